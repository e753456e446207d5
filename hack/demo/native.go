package main

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// nativeBackend takes the place of the backend in rows about kube-proxy's native table.
const nativeBackend iptables.Backend = "native"

// nativeText has the text that kube-proxy 1.36 in nftables mode writes for 100 services.
const nativeText = "hack/bench/heal/testdata/services-100.nft.gz"

// A nativeFlush is one way to remove rules from kube-proxy's native table.
type nativeFlush struct {
	name, command string
	// asked means that the owner may have intended the loss. Then canaryd restore must bring
	// the rules back.
	asked bool
}

func nativeFlushes() []nativeFlush {
	return []nativeFlush{
		{"native-flush-ruleset", "nft flush ruleset", false},
		{"native-flush-table", "nft flush table ip kube-proxy", false},
		{"native-flush-chain", "nft flush chain ip kube-proxy services", false},
		{"native-flush-map", "nft flush map ip kube-proxy service-ips", false},
		{"native-delete-table", "nft delete table ip kube-proxy", true},
	}
}

// scenario returns the row's name and text; tryNative runs it.
func (f nativeFlush) scenario() scenario.Scenario {
	s := scenario.Scenario{Name: f.name, Command: f.command}
	if f.asked {
		s.Command += "; canaryd restore"
	}
	return s
}

// do runs a command, given as words.
func do(ctx context.Context, input string, words ...string) (string, error) {
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(words, " "), err, out)
	}
	return string(out), nil
}

// A nativeLab is a namespace with kube-proxy's native table.
type nativeLab struct {
	program, dir string
	want         string // nft's listing of the table
	process      *canaryd.Process
}

// list returns nft's listing of the table; empty without the table.
func (l *nativeLab) list(ctx context.Context) string {
	out, err := do(ctx, "", "nft", "-s", "list", "table", "ip", "kube-proxy")
	if err != nil {
		return ""
	}
	return out
}

// load writes the table into an empty namespace.
func (l *nativeLab) load(ctx context.Context) error {
	file, err := os.Open(nativeText)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // it was read from only
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return err
	}
	text, err := io.ReadAll(unpacked)
	if err != nil {
		return fmt.Errorf("reading %s: %w", nativeText, err)
	}
	if _, err := do(ctx, "flush ruleset\n"+string(text), "nft", "-f", "-"); err != nil {
		return err
	}
	l.want = l.list(ctx)
	return nil
}

// aStatus has the fields of status -o json that the demo needs.
type aStatus struct {
	Healthy bool
	Native  []struct{ Table, Verdict string }
	Flushes []struct {
		scenario.Record
		Native []struct {
			Kind                    string
			Chains, Rules, Elements int
		}
	}
}

func (l *nativeLab) status(ctx context.Context) (s aStatus, err error) {
	cmd := exec.CommandContext(ctx, l.program, "status", "-o", "json", "--socket="+canaryd.Socket(l.dir))
	out, err := cmd.Output()
	if err != nil && cmd.ProcessState.ExitCode() != 1 { // 1: not healthy
		return s, fmt.Errorf("canaryd status: %w", err)
	}
	return s, json.Unmarshal(out, &s)
}

// await requests the status until it is as wanted.
func (l *nativeLab) await(ctx context.Context, what string, is func(aStatus) bool) (s aStatus, err error) {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if s, err = l.status(ctx); err == nil && is(s) {
			return s, nil
		}
	}
	return s, errors.Join(fmt.Errorf("%s does not come", what), err)
}

// tryNative runs one row: without canaryd, where the rules stay missing, and with it.
func tryNative(ctx context.Context, name, program, dir string) (scenario.Result, error) {
	i := slices.IndexFunc(nativeFlushes(), func(f nativeFlush) bool { return f.name == name })
	if i < 0 {
		return scenario.Result{}, fmt.Errorf("there is no scenario %q", name)
	}
	f, l := nativeFlushes()[i], &nativeLab{program: program, dir: dir}
	result := scenario.Result{Scenario: f.name, Command: f.scenario().Command, Backend: string(nativeBackend)}
	if err := l.load(ctx); err != nil {
		return result, err
	}
	if _, err := do(ctx, "", strings.Fields(f.command)...); err != nil {
		return result, err
	}
	if time.Sleep(time.Second); l.list(ctx) == l.want {
		result.Problems = append(result.Problems, "without canaryd the table is as it was")
	}
	if err := l.load(ctx); err != nil {
		return result, err
	}
	flags := append(canaryd.Flags(iptables.NFT, dir), "--lock-file=/run/xtables.lock")
	p, err := canaryd.Start(exec.CommandContext(ctx, program, flags...), filepath.Join(dir, "canaryd.log"))
	if err != nil {
		return result, err
	}
	l.process = p
	err = l.flush(ctx, f, &result)
	if stopped := p.Stop(20 * time.Second); stopped != nil {
		result.Problems = append(result.Problems, "canaryd run ended with "+stopped.Error())
	}
	if err != nil {
		result.Problems = append(result.Problems, err.Error())
	}
	if len(result.Problems) > 0 {
		result.Log = p.Tail()
	}
	return result, nil
}

// flush flushes while canaryd runs, and waits until the table is back and proved.
func (l *nativeLab) flush(ctx context.Context, f nativeFlush, result *scenario.Result) error {
	guarded := func(s aStatus) bool { return s.Healthy && len(s.Native) == 1 && s.Native[0].Verdict == "intact" }
	if _, err := l.await(ctx, "a canaryd that guards the table", guarded); err != nil {
		return err
	}
	time.Sleep(2 * time.Second) // reads may take a tenth of a core, and the first one was large
	start := time.Now()
	if _, err := do(ctx, "", strings.Fields(f.command)...); err != nil {
		return err
	}
	if f.asked {
		if _, err := l.await(ctx, "a report", func(s aStatus) bool { return len(s.Flushes) > 0 && !s.Healthy }); err != nil {
			return err
		}
		if l.list(ctx) != "" {
			result.Problems = append(result.Problems, "a table that its owner may have deleted came back unasked")
		}
		if _, err := do(ctx, "", l.program, "restore", "--socket="+canaryd.Socket(l.dir)); err != nil {
			return err
		}
	}
	s, err := l.await(ctx, "a proof", func(s aStatus) bool {
		return guarded(s) && len(s.Flushes) > 0 && s.Flushes[0].Outcome == "proved"
	})
	if err != nil {
		return err
	}
	r := s.Flushes[0]
	for _, lost := range r.Native {
		result.Lost = fmt.Sprintf("%s: %d chains, %d rules, %d elements", lost.Kind, lost.Chains, lost.Rules, lost.Elements)
	}
	result.Noticed = r.Time.Add(time.Duration(r.NoticedSeconds * float64(time.Second))).Sub(start)
	result.Back = r.Time.Add(time.Duration(r.AbsentSeconds * float64(time.Second))).Sub(start)
	result.Records = []scenario.Record{r.Record}
	if l.list(ctx) != l.want {
		result.Problems = append(result.Problems, "nft lists another table than before the flush")
	}
	return nil
}
