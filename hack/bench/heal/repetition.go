package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/hack/bench/internal/measure"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// Uses are the measurements of one repetition, by name.
type Uses map[string]measure.Use

// The measurements of a repetition; titles describes them.
const (
	bareRun     = "bare"
	replaceRun  = "replace"
	pollRun     = "poll"
	healRun     = "heal"
	noticeRun   = "notice"
	inForceRun  = "inForce"
	kernelRun   = "kernel"
	proofRun    = "proof"
	replayRun   = "replay"
	restingRun  = "resting"
	learnedRun  = "learned-one"
	rushRun     = "rush"
	busyHealRun = "heal-busy"
	firstRead   = "capture-first"
	fullRead    = "capture-full"
	oneRead     = "capture-one"
	fullExamine = "examine-full"
	oneExamine  = "examine-one"
	decodeRun   = "decode"
	generateRun = "generate"
	declareRun  = "declare-one"
)

// A repetition measures everything in tables once, on one backend at one size, in the namespace
// of this process.
type repetition struct {
	backend  iptables.Backend
	services int
	phase    float64 // the time of the flush within the poll's period, from 0 to 1
	canaryd  string
	perf     string // prefix of the profiles to write; empty for none

	dir     string
	payload payload
	uses    Uses
}

func (r *repetition) run(ctx context.Context) (Uses, error) {
	r.uses = Uses{}
	err := netns.Setup()
	if err == nil {
		r.dir, err = os.MkdirTemp("/run", "bench") // it ends with the namespace
	}
	if err == nil {
		r.payload, err = payload{}.write(r.dir, r.services)
	}
	if err != nil {
		return nil, err
	}
	steps := []func(context.Context) error{r.replace, r.poll, r.inProcess, r.heal}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return nil, fmt.Errorf("%s, %d services: %w", r.backend, r.services, err)
		}
	}
	return r.uses, nil
}

func (r *repetition) program(suffix string) string { return "iptables-" + string(r.backend) + suffix }

// restore runs iptables-restore like kube-proxy, without a flush of other rules.
func (r *repetition) restore(ctx context.Context, path string) (measure.Use, error) {
	return measure.Program(ctx, path, r.program("-restore"), "-w", "5", "--noflush")
}

// flush removes all rules with one command.
func (r *repetition) flush(ctx context.Context) error {
	var err error
	if r.backend == iptables.NFT {
		_, err = measure.Program(ctx, "", "nft", "flush", "ruleset")
	} else {
		_, err = measure.Program(ctx, r.payload.empty, r.program("-restore"), "-w", "5")
	}
	return err
}

// replace loads the rules as on a new node: it replaces the content of the tables.
func (r *repetition) replace(ctx context.Context) error {
	use, err := measure.Program(ctx, r.payload.full, r.program("-restore"), "-w", "5")
	r.uses[replaceRun] = use
	return err
}

// pollEvery is kube-proxy's period (iptables.Monitor with syncPeriod, 30 s by
// default).
const pollEvery = 30 * time.Second

// poll flushes, and then acts like the loops of kube-proxy and kubelet. It executes iptables to
// look for a canary chain, and restores everything once that is gone. The restore is bareRun's.
// It does not wait for the loop's next turn, but adds the wait, because the flushes of all
// repetitions are spread evenly over the period.
func (r *repetition) poll(ctx context.Context) error {
	const chain = "KUBE-PROXY-CANARY"
	if _, err := measure.Program(ctx, "", r.program(""), "-w", "5", "-t", "mangle", "-N", chain); err != nil {
		return err
	}
	if err := r.flush(ctx); err != nil {
		return err
	}
	probe, err := lookFor(ctx, r.program(""), chain)
	if err != nil {
		return err
	}
	bare, err := r.restore(ctx, r.payload.full)
	r.uses[bareRun] = bare
	r.uses[pollRun] = measure.Use{
		Seconds:     (1-r.phase)*pollEvery.Seconds() + probe.Seconds + bare.Seconds,
		UserSeconds: probe.UserSeconds + bare.UserSeconds, SystemSeconds: probe.SystemSeconds + bare.SystemSeconds, MiB: bare.MiB,
	}
	return err
}

// lookFor lists a chain that must be missing.
func lookFor(ctx context.Context, program, chain string) (measure.Use, error) {
	use, err := measure.Work(func() error {
		err := exec.CommandContext(ctx, program, "-w", "5", "-t", "mangle", "-S", chain).Run()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 1 {
			return nil
		}
		return fmt.Errorf("the flush left the chain %s, or iptables failed: %w", chain, err)
	})
	return use, err
}

// inProcess runs this program again for the measurements within a process, so that their memory
// is counted separately.
func (r *repetition) inProcess(ctx context.Context) error {
	uses, err := within(ctx, fmt.Sprintf("lab/%s/%d", r.backend, r.services), r.dir)
	for name, use := range uses {
		r.uses[name] = use
	}
	return err
}

// heal flushes while canaryd runs.
func (r *repetition) heal(ctx context.Context) (err error) {
	// Begin with the rules after a full sync.
	if err := r.flush(ctx); err != nil {
		return err
	}
	if _, err := measure.Program(ctx, r.payload.full, r.program("-restore"), "-w", "5"); err != nil {
		return err
	}
	d, err := start(ctx, r.canaryd, r.dir, r.backend, func(s scenario.Status) bool { return s.Generation.Rules > 0 })
	if err != nil {
		return err
	}
	defer func() {
		if stopped := d.stop(); stopped != nil {
			err = errors.Join(err, fmt.Errorf("canaryd run: %w\n%s", stopped, d.Tail()))
		}
	}()
	before, err := r.save(ctx)
	if err != nil {
		return err
	}
	time.Sleep(r.quiet())
	if r.uses[restingRun], err = d.rest(ctx); err != nil {
		return err
	}
	profile, err := d.record(ctx, r.perf)
	if err != nil {
		return err
	}
	healed, err := d.heal(ctx, func() error { return r.flush(ctx) })
	if err := errors.Join(err, profile()); err != nil {
		return err
	}
	r.uses[healRun], r.uses[noticeRun], r.uses[replayRun] = healed.all, healed.notice, healed.replay
	r.uses[inForceRun], r.uses[proofRun] = healed.inForce, healed.proof
	if healed.kernel.Seconds > 0 { // legacy has no transactions
		r.uses[kernelRun] = healed.kernel
	}
	after, err := r.save(ctx)
	if err != nil {
		return err
	}
	if !slices.Equal(before, after) {
		return fmt.Errorf("other rules came back than were there: %d rules of %d; the first that differ:\n%s%s",
			len(after), len(before), firstOf(before, after), firstOf(after, before))
	}
	return r.follow(ctx, d)
}

// quiet returns how long no process writes before the flush. On legacy, canaryd walks a table
// of 60,000 rules at most once in 10 s while processes write. A flush in a busy time is
// measured separately.
func (r *repetition) quiet() time.Duration {
	if r.backend == iptables.Legacy && r.services > 100 {
		return 12 * time.Second
	}
	return quietFor // enough to save the new generation and to change its nonce
}

// follow makes the owner write while canaryd runs, and flushes again directly after that.
func (r *repetition) follow(ctx context.Context, d *process) (err error) {
	r.uses[learnedRun], err = d.learn(ctx, func() error {
		_, err := r.restore(ctx, r.payload.one)
		return err
	})
	if err != nil {
		return err
	}
	r.uses[rushRun], err = d.rush(ctx, func(turn int) error {
		path := filepath.Join(r.dir, "turn")
		if err := os.WriteFile(path, []byte(r.payload.toPort(10000+turn)), 0o600); err != nil {
			return err
		}
		_, err := r.restore(ctx, path)
		return err
	})
	if err != nil {
		return err
	}
	healed, err := d.heal(ctx, func() error { return r.flush(ctx) })
	r.uses[busyHealRun] = healed.all
	return err
}

// save returns kube-proxy's rules in iptables-save's words, sorted. It shows that a heal was
// not fast because it omitted rules.
func (r *repetition) save(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, r.program("-save")).Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.program("-save"), err)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "-A ") && !strings.Contains(line, "canaryd-") {
			lines = append(lines, line)
		}
	}
	if len(lines) < r.payload.rules {
		return nil, fmt.Errorf("%s prints %d rules of at least %d", r.program("-save"), len(lines), r.payload.rules)
	}
	slices.Sort(lines)
	return lines, nil
}

// firstOf returns the first line of all that others lacks.
func firstOf(all, others []string) string {
	for _, line := range all {
		if _, found := slices.BinarySearch(others, line); !found {
			return line
		}
	}
	return ""
}

// within runs this program once more, in the same namespace.
func within(ctx context.Context, task, dir string) (Uses, error) {
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), marker+"="+task, folder+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Dir(task), err)
	}
	uses := Uses{}
	if err := json.Unmarshal(out, &uses); err != nil {
		return nil, fmt.Errorf("%s printed %.200q: %w", task, out, err)
	}
	return uses, nil
}
