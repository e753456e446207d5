package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// large is a protected chain beyond the limit.
const large = "KUBE-SVC-AAAAAAAAAAAAAAAA"

// restore loads lines into a table of IPv4 and leaves other tables alone.
func restore(n *nodetest.Node, table string, lines ...string) {
	n.Helper()
	for {
		cmd := exec.CommandContext(n.Context(), "iptables-"+string(n.Programs.With)+"-restore", "--noflush", "-w", "60")
		if n.Programs.With == "nft" {
			cmd.Args = cmd.Args[:2]
		}
		cmd.Stdin = strings.NewReader("*" + table + "\n" + strings.Join(lines, "\n") + "\nCOMMIT\n")
		switch out, err := cmd.CombinedOutput(); {
		case err == nil:
			return
		case !listedTwice(string(out)):
			n.Fatalf("%s: %v: %s", cmd, err, out)
		}
	}
}

// listedTwice reports whether a restore with -X failed without a write, because the kernel had
// listed chains twice. That happens while another transaction, such as a replay, makes chains
// of an earlier table. iptables-nft then deletes each listed chain, and the second deletion
// fails.
func listedTwice(out string) bool {
	return strings.Contains(out, "CHAIN_DEL failed (No such file or directory)")
}

// fill returns commands that declare a chain and fill it.
func fill(chain string, count int) []string {
	lines := []string{fmt.Sprintf(":%s - [0:0]", chain)}
	for i := range count {
		lines = append(lines, fmt.Sprintf(`-A %s -s 10.%d.%d.%d/32 -p tcp -m comment --comment "ns-%d/service-%d:http cluster IP" -m tcp --dport %d -j ACCEPT`,
			chain, i>>16, i>>8&255, i&255, i%77, i, i%60000+1))
	}
	return lines
}

// status returns the running daemon's status.
func status(n *nodetest.Node) api.Status {
	n.Helper()
	code, stdout, stderr := n.Canaryd("status", "-o", "json")
	var s api.Status
	if err := json.Unmarshal([]byte(stdout), &s); err != nil || code > 1 {
		n.Fatalf("canaryd status: exit code %d, %v\n%s", code, err, stderr)
	}
	return s
}

// leftOut waits until exactly these chains of nat are left out, with these numbers of rules.
func leftOut(n *nodetest.Node, want ...api.LeftOut) api.Status {
	n.Helper()
	var s api.Status
	n.Until("the chains that are left out", func() error {
		s = status(n)
		if diff := cmp.Diff(want, s.LeftOut); diff != "" {
			return fmt.Errorf("(-want +got)\n%s", diff)
		}
		return nil
	})
	return s
}

// others returns all chains and rules without those of the large chain, with or without the
// jumps to it.
func others(n *nodetest.Node, jumps bool) []string {
	n.Helper()
	var kept []string
	for _, line := range n.Lines(func(_ rules.TableName, name string) bool { return n.Protects(name) && name != large },
		func(r rules.Rule) bool { return n.Protects(r.Target) }) {
		if !strings.Contains(line, "nat "+large) && (jumps || !strings.Contains(line, "-j "+large)) {
			kept = append(kept, line)
		}
	}
	return kept
}

// jumps returns the number of rules that lead to the large chain.
func jumps(n *nodetest.Node) int {
	n.Helper()
	count := 0
	for _, c := range n.Save()[rules.IPv4][rules.Nat].Chains {
		for _, r := range c.Rules {
			if r.Target == large {
				count++
			}
		}
	}
	return count
}

// verdicts returns nil if every table is intact and the generation is not behind.
func verdicts(s api.Status) error {
	if !s.LearningPendingSince.IsZero() {
		return fmt.Errorf("what is new since %s is not captured", s.LearningPendingSince)
	}
	return s.Ready()
}

// partial returns nil if no lost rule could be put back, and the generation is not behind.
func partial(s api.Status) error {
	if !s.LearningPendingSince.IsZero() {
		return fmt.Errorf("what is new since %s is not captured", s.LearningPendingSince)
	}
	if h := s.Health(); h.State != api.StatePartial {
		return fmt.Errorf("the node is %q", h)
	}
	return nil
}

// intact waits until verdicts returns nil.
func intact(n *nodetest.Node) (s api.Status) {
	n.Helper()
	n.Until("all tables to be intact", func() error { s = status(n); return verdicts(s) })
	return s
}

// TestAChainThatIsTooLargeCostsItselfOnly: canaryd reports a chain that is too large as not
// guarded. After a flush it restores all others, and makes no chain, jump or rule for the large
// one. It guards the owner's later rules once they fit.
func TestAChainThatIsTooLargeCostsItselfOnly(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		const size = 1500
		restore(n, "nat", append(fill(large, size), "-A KUBE-SERVICES -d 10.9.9.9/32 -j "+large, "-A OUTPUT -d 10.8.8.8/32 -j "+large)...)
		p := n.Start("--max-rules=1000")
		place := api.LeftOut{Family: rules.IPv4, Table: rules.Nat, Chain: large, Rules: size}
		leftOut(n, place)
		s := intact(n)
		if !s.Healthy {
			n.Error("a node is not healthy of which a chain is left out that stands")
		}
		p.WantLog("E", "Chains are left out", large, "1500 rules", "--max-rules")
		if got := n.Metrics()[`chains_left_out{family="ipv4",table="nat"}`]; got != 1 {
			n.Errorf("chains_left_out is %v, want 1", got)
		}
		text, _ := n.Want(0, "status")
		for _, want := range []string{"healthy, but the rules of one chain are not guarded\n", "NOT guarded: ipv4 nat " + large + ": it holds 1500 rules;"} {
			if !strings.Contains(text, want) {
				n.Errorf("canaryd status does not say %q:\n%s", want, text)
			}
		}
		before, without := others(n, true), others(n, false)

		// The chains exist without rules, so the jumps have a target.
		n.Flush()
		n.Until("the others to be back", func() error {
			if diff := cmp.Diff(before, others(n, true)); diff != "" {
				return fmt.Errorf("(-want +got)\n%s", diff)
			}
			return partial(status(n))
		})
		s = status(n)
		if len(s.Quarantined) != 1 || s.Quarantined[0].Chain != large || len(s.LeftOut) != 0 {
			n.Errorf("after a flush: in quarantine %+v, left out %+v; want the large chain in quarantine", s.Quarantined, s.LeftOut)
		}

		// The owner writes it again, with the same size.
		restore(n, "nat", fill(large, size)...)
		leftOut(n, place)
		n.Until("the quarantine to end", func() error {
			if s := status(n); len(s.Quarantined) > 0 {
				return fmt.Errorf("in quarantine: %+v", s.Quarantined)
			}
			return nil
		})

		// -X deletes the chains too, so the jumps have no target.
		for _, table := range protect.Always() {
			restore(n, string(table), "-F", "-X") // both at once, before canaryd can heal
		}
		n.Until("the others to be back", func() error {
			if diff := cmp.Diff(without, others(n, true)); diff != "" {
				return fmt.Errorf("(-want +got)\n%s", diff)
			}
			return partial(status(n))
		})
		if s = status(n); len(s.Quarantined) != 3 {
			n.Errorf("after -F and -X %d rules are in quarantine, want the large chain and both jumps: %+v", len(s.Quarantined), s.Quarantined)
		}
		if n.Save()[rules.IPv4][rules.Nat].Chain(large) != nil {
			n.Error("canaryd has made the chain of which it knows nothing")
		}

		// The chain returns small: its jumps follow, and canaryd guards it.
		restore(n, "nat", fill(large, 3)...)
		n.Until("the jumps to be back", func() error {
			s := status(n)
			if diff := cmp.Diff(before, others(n, true)); diff != "" || len(s.Quarantined)+len(s.LeftOut) > 0 {
				return fmt.Errorf("in quarantine %+v, left out %+v (-want +got)\n%s", s.Quarantined, s.LeftOut, diff)
			}
			return verdicts(s)
		})
		whole := n.Save()[rules.IPv4][rules.Nat].Chain(large).Rules
		n.Flush()
		n.Until("the chain to be back", func() error {
			if diff := cmp.Diff(whole, n.Save()[rules.IPv4][rules.Nat].Chain(large).Rules); diff != "" || jumps(n) != 2 {
				return fmt.Errorf("%d jumps (-want +got)\n%s", jumps(n), diff)
			}
			return verdicts(status(n))
		})
	})
}

// TestAChainThatGrowsAndShrinks: a chain that grows beyond the limit is left out, and nothing
// of its former content is replayed. After it has shrunk canaryd guards it again. Near the
// limit that does not alternate.
func TestAChainThatGrowsAndShrinks(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		restore(n, "nat", append(fill(large, 10), "-A KUBE-SERVICES -d 10.9.9.9/32 -j "+large)...)
		n.Start("--max-rules=1000")
		grow := fill(large, 1500)[11:]
		restore(n, "nat", grow...)
		leftOut(n, api.LeftOut{Family: rules.IPv4, Table: rules.Nat, Chain: large, Rules: 1500})
		others := n.Status().Generation.Rules

		// It stays out while all rules would only just fit.
		restore(n, "nat", fill(large, 600)...)
		if s := intact(n); len(s.LeftOut) != 1 {
			n.Errorf("a chain came back as soon as it fitted: %+v", s.LeftOut)
		}

		restore(n, "nat", fill(large, 5)...)
		leftOut(n)
		n.Until("the generation to have it", func() error {
			if s := status(n); s.Generation.Rules != others+5 {
				return fmt.Errorf("the generation has %d rules, want %d", s.Generation.Rules, others+5)
			}
			return verdicts(status(n))
		})
	})
}

// TestABuiltInChainThatIsTooLarge: canaryd does not guard the jumps in such a chain, but those
// in others.
func TestABuiltInChainThatIsTooLarge(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		restore(n, "nat", fill("OUTPUT", 1500)[1:]...)
		n.Start("--max-rules=1000")
		s := leftOut(n, api.LeftOut{Family: rules.IPv4, Table: rules.Nat, Chain: "OUTPUT", Rules: 1502})
		intact(n)
		before := others(n, true)
		n.Flush()
		outputs := func(line string) bool { return strings.Contains(line, "ipv4 nat OUTPUT") }
		n.Until("the others to be back", func() error {
			if diff := cmp.Diff(slices.DeleteFunc(slices.Clone(before), outputs), others(n, true)); diff != "" {
				return fmt.Errorf("(-want +got)\n%s", diff)
			}
			return partial(status(n))
		})
		if s = status(n); len(s.Quarantined) != 1 || s.Quarantined[0].Chain != "OUTPUT" {
			n.Errorf("in quarantine %+v, want what stood in OUTPUT", s.Quarantined)
		}
		// The owner restores its jump.
		restore(n, "nat", "-A OUTPUT -j KUBE-SERVICES")
		n.Until("the quarantine to end", func() error {
			if s := status(n); len(s.Quarantined) > 0 {
				return fmt.Errorf("in quarantine: %+v", s.Quarantined)
			}
			return nil
		})
	})
}

// manifestLimit is the memory limit of deploy/kubernetes.
const manifestLimit = 448 << 10 // KiB

// peak returns the largest memory of a process so far, in KiB.
func peak(n *nodetest.Node, p *nodetest.Process) int {
	n.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	n.Must(err)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(value)[0])
			n.Must(err)
			return kib
		}
	}
	n.Fatal("no VmHWM")
	return 0
}

// TestMemoryBelowTheManifestsLimit: 240,000 rules are more than twice canaryd's limit. It needs
// no more memory than the manifest allows: not to capture, after a flush, or after a restart
// with stored rules.
func TestMemoryBelowTheManifestsLimit(t *testing.T) {
	testkit.Large(t, "240,000 rules")
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		const chains, each = 240, 1000
		var lines []string
		for i := range chains {
			name := fmt.Sprintf("KUBE-SVC-AAAAAAAAAAAAAA%c%c", 'A'+i/26, 'A'+i%26)
			lines = append(append(lines, fill(name, each)...), "-A KUBE-SERVICES -d 10.9.9.9/32 -j "+name)
		}
		restore(n, "nat", lines...)
		settled := func(p *nodetest.Process, so func(api.Status) error) api.Status {
			n.Helper()
			var s api.Status
			n.Until("canaryd to have learned", func() error {
				if !p.Running() {
					n.Fatal("canaryd ended")
				}
				if _, err := nodetest.Fetch("/healthz"); err != nil {
					return err
				}
				if s = status(n); s.Generation.Rules < 50_000 {
					return errors.New("the generation is small")
				}
				return so(s)
			})
			return s
		}
		p := n.Launch()
		s := settled(p, verdicts)
		left := int(nodetest.Sum(n.Metrics(), "chains_left_out"))
		if left < 130 || left > 200 || len(s.LeftOut) != 100 {
			n.Errorf("%d chains are left out, and %d listed", left, len(s.LeftOut))
		}
		report := func(when string, p *nodetest.Process) {
			n.Helper()
			kib := peak(n, p)
			n.Logf("%s: %d rules kept, %d chains left out, VmHWM %d MiB", when, s.Generation.Rules, left, kib>>10)
			if kib > manifestLimit {
				n.Errorf("%s canaryd had %d KiB, and the manifest allows %d", when, kib, manifestLimit)
			}
		}
		report("at capture", p)
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Until("the rest to be back", func() error {
			s := status(n)
			if len(s.Flushes) == 0 || len(s.Quarantined) == 0 {
				return fmt.Errorf("%d flushes, %d rules in quarantine, %d chains left out, tables %v", len(s.Flushes), len(s.Quarantined), len(s.LeftOut), s.Families)
			}
			return partial(s)
		})
		report("after a flush", p)
		p.Stop()
		p = n.Launch()
		settled(p, partial)
		report("after a restart", p)
	})
}
