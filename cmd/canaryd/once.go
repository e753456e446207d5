package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A bench has the tools of a command without a daemon: the kernel, and the last daemon's store.
type bench struct {
	o      *options
	kernel *iptables.Kernel
	store  *reload.Store
}

// withBench runs do without a daemon, and lets none start meanwhile. It calls do with the
// opened kernel and store. The code is do's exit code.
func withBench(ctx context.Context, o *options, do func(bench) (int, error)) (code int, err error) {
	release, err := here.Exclude()
	if err != nil {
		return exitError, fmt.Errorf("%w, but not at --socket %s", err, o.socket)
	}
	defer release()
	kernel, store, err := open(ctx, o)
	if err != nil {
		return exitError, err
	}
	if err = o.expandGeneration(); err == nil {
		code, err = do(bench{o, kernel, store})
	}
	return code, cmp.Or(err, kernel.Close())
}

// expandGeneration completes a shortened ID of a stored generation, if no daemon runs.
func (o *options) expandGeneration() (err error) {
	o.generation, err = reload.ExpandID(o.generation, append(reload.StoredIDs(o.stateDir), nativestore.IDs(o.stateDir)...))
	return err
}

func (b bench) replayer() reload.Replayer {
	return reload.Replayer{Kernel: b.kernel, Canary: b.o.canaryChain, Protection: b.o.selector.Protection(), Supplier: iptables.NewSets()}
}

// job returns a job on stored rules for a replay or a judgement without a daemon. An operator
// requested it, so it does not wait for the jump grace: all families are Quiet.
func (b bench) job(g rules.Generation, marks canary.Marks) reload.Job {
	j := reload.Job{Families: b.kernel.Families(), Generation: g, Marks: marks, Quiet: map[rules.Family]bool{}}
	for _, f := range j.Families {
		j.Quiet[f] = true
	}
	return j
}

// runCheck looks once. With -o line it prints a line even if it cannot look, so that the line
// says why.
func runCheck(ctx context.Context, o *options, to streams) (int, error) {
	code, err := look(ctx, o, to)
	if err != nil && o.output == "line" {
		_, _ = fmt.Fprintln(to.out, errorLine(err)) // if printing fails, err is still the error to report
	}
	return code, err
}

// look requests the verdicts from the daemon. Without a daemon it judges the last daemon's
// stored rules.
func look(ctx context.Context, o *options, to streams) (int, error) {
	status, err := o.client().Look(ctx)
	if err == nil && status.NothingProtected != nil && o.output == "line" {
		_, err := fmt.Fprintln(to.out, nothingLine)
		return exitOK, err
	}
	if err == nil {
		return report(o, to, status)
	}
	if !errors.Is(err, control.ErrNoDaemon) {
		return exitError, err
	}
	return withBench(ctx, o, func(b bench) (int, error) {
		state, stored, err := b.store.LoadState()
		if err != nil {
			return exitError, fmt.Errorf("there is nothing to compare with, and no daemon is running: %w", err)
		}
		judged := api.Status{Families: map[rules.Family]api.Verdicts{}}
		judged.Generation.Rules, judged.Generation.Chains = stored.Generation.Counts()
		job := b.job(stored.Generation, state.Marks)
		job.Quarantine = state.Quarantine
		for _, f := range b.kernel.Families() {
			snapshot, err := b.kernel.Read(ctx, f)
			if err != nil {
				return exitError, err
			}
			examiner := reload.Examiner{Canary: o.canaryChain, Protection: o.selector.Protection()}
			verdicts := api.Verdicts{}
			for t, x := range examiner.Examine(snapshot, job) {
				if x.Finding.Unmarked {
					continue
				}
				verdicts[t] = x.Finding.Verdict
				if id := f.Table(t); verdicts[t] == canary.Intact || verdicts[t] == canary.Changed {
					_, left := job.Quarantine.Supplement(f, t, job.Generation[id], x.Section, examiner.Protection.Piecewise)
					for _, h := range left[id] {
						verdicts[t] = canary.Partial
						judged.Quarantined = append(judged.Quarantined, api.QuarantinedOf(id, h))
					}
				}
			}
			b.awaiting(snapshot, verdicts)
			judged.Families[f] = verdicts
		}
		rows, parts := b.checkNative()
		judged.Native = rows
		judged.ShowQuarantined(append(judged.Quarantined, parts...))
		for _, u := range b.store.LoadUnread(here.BootedAt(here.Uptime())) {
			judged.StateUnread = append(judged.StateUnread, daemon.PublicUnread(u))
		}
		return report(o, to, judged)
	})
}

// report prints the verdicts of a status, and the other findings of a look. It returns check's
// exit code: exitNo after a loss, exitError if something is unknown.
func report(o *options, to streams, s api.Status) (int, error) {
	var err error
	if o.output == "line" {
		_, err = fmt.Fprintln(to.out, lineOf(s))
	} else {
		err = printVerdicts(to.out, o.output, s)
	}
	all := s.Tally()
	switch {
	case len(all.Lost)+len(all.Refused) > 0:
		return exitNo, err
	case len(all.Unknown) > 0, len(s.StateUnread) > 0:
		return exitError, err
	default:
		return exitOK, err
	}
}

// runRender prints a generation: the daemon's, else the stored one, else the kernel's present
// rules.
func runRender(ctx context.Context, o *options, to streams) (int, error) {
	family := o.families[0]
	if !o.uses("snapshot") || o.rulesDir != "" {
		if o.check {
			return checkDeclared(ctx, o, to)
		}
		return renderDeclared(ctx, o, to, family)
	}
	if o.check {
		return exitError, errors.New("--check is for declared rules: name their files with --rules-dir, or --source=manifest and --manifest")
	}
	if len(o.families) > 1 {
		_, _ = fmt.Fprintln(to.err, "canaryd: printing ipv4; --ip-family=ipv6 prints the other family")
	}
	text, err := o.client().Render(ctx, api.RenderRequest{Generation: o.generation, Family: family})
	switch {
	case err == nil:
		_, err = fmt.Fprint(to.out, text)
	case errors.Is(err, control.ErrNoDaemon):
		if err := o.expandGeneration(); err != nil {
			return exitError, err
		}
		if shown, err := renderNative(o, to); shown || err != nil {
			return exitOK, err
		}
		return withBench(ctx, o, func(b bench) (int, error) {
			g, err := b.generation(ctx, to)
			if err == nil {
				_, err = fmt.Fprint(to.out, rules.Render(g, family))
			}
			return exitOK, err
		})
	}
	return exitOK, err
}

// generation returns the generation that runRender prints without a daemon: of --generation,
// else the stored one, else the kernel's protected rules. It writes a heading or a remark to
// to.
func (b bench) generation(ctx context.Context, to streams) (rules.Generation, error) {
	if b.o.generation != "" {
		stored, note, err := b.store.Show(b.o.generation)
		if err != nil {
			return nil, fmt.Errorf("%w; %s", err, b.store.Offer())
		}
		_, err = fmt.Fprint(to.out, onrequest.Heading(stored.ID, stored.Captured, note))
		return stored.Generation, err
	}
	_, stored, err := b.store.LoadState()
	if err == nil {
		return stored.Generation, nil
	}
	_, _ = fmt.Fprintf(to.err, "canaryd: %s; printing the rules in the kernel\n", plain(oneLine(err.Error())))
	g := rules.Generation{}
	for _, f := range b.kernel.Families() {
		snapshot, err := b.kernel.Read(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, t := range protect.Tables() {
			if err := snapshot.Unreadable[t]; err != nil {
				return nil, fmt.Errorf("%s %s: %w", f, t, err)
			}
			g = g.With(f.Table(t), b.o.selector.Protection().Extract(snapshot.Tables[t], canary.IsMark))
		}
	}
	return g, nil
}

// runStatus prints the daemon's status, or with --flush one record; --watch repeats it. A node
// that is not healthy is exitNo.
func runStatus(ctx context.Context, o *options, to streams) (int, error) {
	if o.oneFlush && o.watch {
		return exitError, errors.New("--flush and --watch exclude each other")
	}
	if o.oneFlush {
		return runFlush(ctx, o, to)
	}
	if o.watch {
		return runWatch(ctx, o, to)
	}
	status, err := o.client().Status(ctx)
	if err != nil {
		return exitError, err
	}
	err = printStatus(to.out, o.output, status)
	if !status.Healthy {
		return exitNo, err
	}
	return exitOK, err
}

// runPause pauses the replays of the daemon for --for. The user's name and --why appear in its
// status.
func runPause(ctx context.Context, o *options, to streams) (int, error) {
	reply, err := o.client().Pause(ctx, api.PauseRequest{Seconds: o.pause.Seconds(), By: cmp.Or(os.Getenv("SUDO_USER"), os.Getenv("USER")), Why: o.why})
	if err != nil {
		return exitError, err
	}
	again := ""
	if reply.WasPaused {
		again = ", in place of the earlier pause"
	}
	return exitOK, show(to.out, o.output, reply, func(w io.Writer) {
		fmt.Fprintf(w, "replays are paused until %s%s\n", reply.Until.UTC().Format(time.RFC3339), again)
	})
}

// runResume ends a pause of the daemon; it is no error if there was none.
func runResume(ctx context.Context, o *options, to streams) (int, error) {
	reply, err := o.client().Resume(ctx)
	if err != nil {
		return exitError, err
	}
	what := "replays are no longer paused"
	if !reply.WasPaused {
		what = "there was no pause"
	}
	return exitOK, show(to.out, o.output, reply, func(w io.Writer) { fmt.Fprintln(w, what) })
}

// runCleanup removes the marks, and with --rules the protected rules, through the daemon if one
// runs. With --stay it does not end before ctx.
func runCleanup(ctx context.Context, o *options, to streams) (int, error) {
	request := api.CleanupRequest{Rules: o.rules}
	if o.protectGiven {
		request.Protect = protect.Join(o.protect)
	}
	err := o.client().Cleanup(ctx, request)
	if errors.Is(err, control.ErrNoDaemon) {
		if o.rules && !o.protectGiven {
			return exitError, onrequest.ErrWhoseRules
		}
		o.maxRules = 0 // a chain that is left out could not be removed
		_, err = withBench(ctx, o, func(b bench) (int, error) {
			err := onrequest.RemoveAll(ctx, b.replayer(), b.job(nil, nil), o.rules)
			state, _, _ := b.store.LoadState() // after an unreadable state, the tables that canaryd made are unknown
			onrequest.RemoveMade(ctx, b.kernel, state.MadeTables)
			return exitOK, errors.Join(err, native.RemoveWitnesses(b.kernel.Port()), native.RemoveDrills(b.kernel.Port()), nativestore.Forget(o.stateDir), b.store.Forget())
		})
	}
	if err != nil {
		return exitError, err
	}
	what := "canaries and witnesses are removed"
	if o.rules {
		what = "canaries, witnesses, protected chains and their jumps are removed"
	}
	_, err = fmt.Fprintln(to.out, what)
	if o.stay && err == nil {
		<-ctx.Done()
	}
	return exitOK, err
}
