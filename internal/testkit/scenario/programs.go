package scenario

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Programs is a Flusher that executes the real programs in the network namespace of this process.
type Programs struct {
	With iptables.Backend
	// Lock is the path of the xtables lock; empty means the programs' own.
	Lock string
}

var _ Flusher = Programs{}

// lockWait is how many seconds programs wait for the xtables lock. On a starved machine canaryd
// holds it for longer than the five seconds of kube-proxy.
const lockWait = "60"

// Backend returns the backend whose programs are executed.
func (p Programs) Backend() iptables.Backend { return p.With }

// Flush runs iptables -F.
func (p Programs) Flush(ctx context.Context, family rules.Family, table rules.TableName, chain string) error {
	args := []string{"-w", lockWait, "-t", string(table), "-F"}
	if chain != "" {
		args = append(args, chain)
	}
	return p.run(ctx, p.name(family, ""), args...)
}

// DeleteChains runs iptables -X.
func (p Programs) DeleteChains(ctx context.Context, family rules.Family, table rules.TableName) error {
	return p.run(ctx, p.name(family, ""), "-w", lockWait, "-t", string(table), "-X")
}

// Restore runs iptables-restore.
func (p Programs) Restore(ctx context.Context, family rules.Family, text string) error {
	_, err := p.execute(ctx, text, p.name(family, "-restore"), "-w", lockWait)
	return err
}

// RestoreNoflush runs iptables-restore --noflush.
func (p Programs) RestoreNoflush(ctx context.Context, family rules.Family, text string) error {
	_, err := p.execute(ctx, text, p.name(family, "-restore"), "-w", lockWait, "--noflush")
	return err
}

// Save runs iptables-save.
func (p Programs) Save(ctx context.Context, family rules.Family) (string, error) {
	return p.save(ctx, family)
}

// SaveTable runs iptables-save for one table.
func (p Programs) SaveTable(ctx context.Context, family rules.Family, table rules.TableName) (string, error) {
	return p.save(ctx, family, "-t", string(table))
}

// save runs iptables-save, on nft until no process commits meanwhile: iptables-nft-save 1.8.9
// reads a chain's rules once more after a commit, and then prints them twice. In a storm of commits
// the last of mostSaves counts.
func (p Programs) save(ctx context.Context, family rules.Family, args ...string) (string, error) {
	if p.With != iptables.NFT {
		return p.execute(ctx, "", p.name(family, "-save"), args...)
	}
	conn, err := nft.Dial()
	if err != nil {
		return "", err
	}
	defer conn.Close()
	for try := 1; ; try++ {
		before, err := conn.Genid()
		if err != nil {
			return "", err
		}
		text, err := p.execute(ctx, "", p.name(family, "-save"), args...)
		if err != nil {
			return "", err
		}
		if after, err := conn.Genid(); err != nil || after == before || try == mostSaves {
			return text, err
		}
	}
}

// mostSaves bounds how often save runs iptables-save next to a busy writer.
const mostSaves = 10

// DeleteTable runs nft delete table.
func (p Programs) DeleteTable(ctx context.Context, family rules.Family, table rules.TableName) error {
	return p.nft(ctx, "delete", "table", family.NFT(), string(table))
}

// FlushTable runs nft flush table.
func (p Programs) FlushTable(ctx context.Context, family rules.Family, table rules.TableName) error {
	return p.nft(ctx, "flush", "table", family.NFT(), string(table))
}

// FlushRuleset runs nft flush ruleset.
func (p Programs) FlushRuleset(ctx context.Context) error { return p.nft(ctx, "flush", "ruleset") }

func (p Programs) nft(ctx context.Context, words ...string) error {
	if p.With != iptables.NFT {
		return fmt.Errorf("nft cannot change tables of the %s backend", p.With)
	}
	return p.run(ctx, "nft", words...)
}

// name returns a program's name, such as "ip6tables-legacy-restore".
func (p Programs) name(family rules.Family, suffix string) string {
	base := "iptables"
	if family == rules.IPv6 {
		base = "ip6tables"
	}
	return base + "-" + string(p.With) + suffix
}

func (p Programs) run(ctx context.Context, name string, args ...string) error {
	_, err := p.execute(ctx, "", name, args...)
	return err
}

func (p Programs) execute(ctx context.Context, input, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	if p.Lock != "" {
		cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+p.Lock)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
