package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
)

// ofNative takes the place of iptables' backend in tasks and reports.
const ofNative = "native"

// nativeTitles are the measurements of native tables, with the text if it differs from that of
// iptables' tables.
func nativeTitles() map[string]string {
	same := "="
	return map[string]string{
		healRun: same, inForceRun: same, proofRun: same, noticeRun: same, restingRun: same, firstRead: same, oneRead: same, learnedRun: same,
		kernelRun: "the kernel, for the same transaction by hand",
		bareRun:   "nft -f of the same text by hand",
	}
}

// textOf describes a measurement on a backend.
func (t title) textOf(backend string) string {
	if text := nativeTitles()[t.what]; backend == ofNative && text != "=" {
		return text
	}
	return t.text
}

// A nativeRepetition measures kube-proxy's nftables mode once, at one size, in the namespace of
// this process.
type nativeRepetition struct {
	services int
	canaryd  string

	dir  string
	uses Uses
}

func (r *nativeRepetition) run(ctx context.Context) (Uses, error) {
	r.uses = Uses{}
	text, err := data(r.services, "nft")
	if err == nil {
		err = netns.Setup()
	}
	if err == nil {
		r.dir, err = os.MkdirTemp("/run", "bench") // it ends with the namespace
	}
	if err == nil {
		err = os.WriteFile(r.path(), text, 0o600)
	}
	if err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{r.bare, r.inProcess, r.heal} {
		if err := step(ctx); err != nil {
			return nil, fmt.Errorf("native, %d services: %w", r.services, err)
		}
	}
	return r.uses, nil
}

func (r *nativeRepetition) path() string { return filepath.Join(r.dir, "services.nft") }

// bare loads the tables, flushes them, and loads them again like an operator would by hand. The
// kernel frees deleted memory meanwhile, 1 MiB for each of kube-proxy's sets for session
// affinity, as it does while canaryd puts the tables back.
func (r *nativeRepetition) bare(ctx context.Context) error {
	if _, err := measure.Program(ctx, "", "nft", "-f", r.path()); err != nil {
		return err
	}
	if err := nftFlush(ctx); err != nil {
		return err
	}
	var err error
	r.uses[bareRun], err = measure.Program(ctx, "", "nft", "-f", r.path())
	return err
}

func nftFlush(ctx context.Context) error {
	_, err := measure.Program(ctx, "", "nft", "flush", "ruleset")
	return err
}

func (r *nativeRepetition) inProcess(ctx context.Context) error {
	uses, err := within(ctx, fmt.Sprintf("native-lab/%d", r.services), r.dir)
	for name, use := range uses {
		r.uses[name] = use
	}
	return err
}

// heal flushes while canaryd runs. Its backend is legacy, which the flush does not affect.
func (r *nativeRepetition) heal(ctx context.Context) (err error) {
	d, err := start(ctx, r.canaryd, r.dir, iptables.Legacy, func(s scenario.Status) bool { return len(s.Native) == 1 },
		"--protect=nft:ip:kube-proxy")
	if err != nil {
		return err
	}
	defer func() {
		if stopped := d.stop(); stopped != nil {
			err = errors.Join(err, fmt.Errorf("canaryd run: %w\n%s", stopped, d.Tail()))
		}
	}()
	before, err := list(ctx)
	if err != nil {
		return err
	}
	time.Sleep(quietFor)
	if r.uses[restingRun], err = d.rest(ctx); err != nil {
		return err
	}
	healed, err := d.heal(ctx, func() error { return nftFlush(ctx) })
	if err != nil {
		return err
	}
	r.uses[healRun], r.uses[noticeRun], r.uses[inForceRun], r.uses[proofRun] = healed.all, healed.notice, healed.inForce, healed.proof
	after, err := list(ctx)
	if err != nil {
		return err
	}
	if !slices.Equal(before, after) {
		return fmt.Errorf("other rules came back than were there: %d lines of %d; the first that differ:\n%s%s",
			len(after), len(before), firstOf(before, after), firstOf(after, before))
	}
	change, err := replaceEndpoint(r.path(), 1)
	if err != nil {
		return err
	}
	r.uses[learnedRun], err = d.learn(ctx, func() error { return nftLoad(ctx, change) })
	return err
}

// list returns nft's listing of kube-proxy's table, sorted.
func list(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "nft", "-s", "list", "table", "ip", "kube-proxy").Output()
	if err != nil {
		return nil, fmt.Errorf("nft list table ip kube-proxy: %w", err)
	}
	lines := strings.Split(string(out), "\n")
	slices.Sort(lines)
	return lines, nil
}

// nftLoad makes nft write a text.
func nftLoad(ctx context.Context, text string) error {
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft -f -: %w: %s", err, out)
	}
	return nil
}

// choice matches a service's chain that chooses between endpoints.
var choice = regexp.MustCompile(`chain (service-\S+/tcp/\S+) \{\n\t\tmeta l4proto tcp dnat ip to numgen`)

// replaceEndpoint returns kube-proxy's text for other endpoints of one service in that file.
func replaceEndpoint(path string, turn int) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	found := choice.FindStringSubmatch(string(text))
	if found == nil {
		return "", fmt.Errorf("%s has no service with endpoints", path)
	}
	return fmt.Sprintf(`flush chain ip kube-proxy %[1]s
add rule ip kube-proxy %[1]s meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.9.0.%[2]d . 80, 1 : 10.9.1.%[2]d . 80 }
`, found[1], turn), nil
}

// measureNativeLab measures, in a process of their own, reads of the tables in this namespace,
// and the kernel's time for them.
func measureNativeLab(ctx context.Context, services int, dir string) (Uses, error) {
	k := native.NewLateKernel(0, func(uint32, uint32) bool { return false }, nil, 0)
	if _, err := k.Wake(nil); err != nil {
		return nil, err
	}
	defer func() { _ = k.Close() }() // the namespace ends
	wanted := func(t nft.Table) bool { return t.Name == "kube-proxy" }
	uses := Uses{}
	var tables *native.Ruleset
	follow := func(what string) error {
		use, err := measure.Work(func() (err error) {
			tables, err = k.Follow(wanted)
			return err
		})
		uses[what] = use
		return err
	}
	if err := follow(firstRead); err != nil {
		return nil, err
	}
	for turn := range 2 { // the first change creates the index for later ones
		change, err := replaceEndpoint(filepath.Join(dir, "services.nft"), 2+turn)
		if err == nil {
			err = nftLoad(ctx, change)
		}
		if err == nil {
			err = follow(oneRead)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := nftFlush(ctx); err != nil {
		return nil, err
	}
	b := nft.NewBatch()
	for _, t := range tables.InOrder() {
		if _, err := t.Create(b, native.Options{}); err != nil {
			return nil, err
		}
	}
	b.Finish()
	if err := b.Send(); err != nil {
		return nil, fmt.Errorf("writing the tables of %d services: %w", services, err)
	}
	uses[kernelRun] = measure.Use{Seconds: b.Took.Seconds()}
	return uses, nil
}
