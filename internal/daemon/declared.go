package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Declaration is the content of the declared sources at one moment.
type Declaration struct {
	Generation rules.Generation
	// Claims reports whether the sources own a chain, wanted or not. It must
	// always give the same answer.
	Claims func(chain string) bool
	// Origin returns where a rule is declared; a jump's chain is built in. nil: that is
	// not known.
	Origin func(f rules.Family, t rules.TableName, chain string, r rules.Rule) Origin
}

// Two programs that both own a chain undo each other for ever. Claimed chains that drift more
// than driftsKept times within driftWindow belong to another program, and canaryd only observes
// from then on.
const (
	driftWindow = time.Minute
	driftsKept  = 3
)

// declared is the content of the declared sources, with its written part.
type declared struct {
	now     Declaration       // the present content; the zero value if there is none
	retired map[string]bool   // chains that were declared once and are claimed no more
	broken  []api.SourceError // errors in the files
	inForce *Declaration      // the content that was written and proved last; nil: nothing yet
	retry   pace.Retry        // when it is written; zero: it is in force
	// unapplied are the tables whose declaration could not be written.
	unapplied map[rules.TableID]bool
	trouble   pace.Trouble // why
	drifts    []time.Time  // of the last minute
}

// with returns the declaration with another generation.
func (s Declaration) with(g rules.Generation) *Declaration {
	s.Generation = g
	return &s
}

// declare takes the new content of the declared sources. A chain that they no longer claim
// stays claimed for the rest of the run. Otherwise it would count as another owner's chain, and
// stay.
func (st *state) declare(next Declaration, now time.Time) {
	retired := map[string]bool{} // the earlier claims keep their own map
	maps.Copy(retired, st.declared.retired)
	for _, s := range st.declared.now.Generation {
		for _, c := range s.Chains {
			if !next.Claims(c.Name) {
				retired[c.Name] = true
			}
		}
	}
	st.declared.retired = retired
	st.declared.now = next
	st.declared.now.Claims = func(chain string) bool { return next.Claims(chain) || retired[chain] }
	clear(st.extracted) // another protection may take other chains
	for id, ts := range st.tables() {
		own := st.declared.now.Generation[id]
		ts.spared = ts.spared && own.Bare()
	}
	learned := &st.generation.learned
	learned.Generation = st.unclaimed(learned.Generation)
	st.generation.made = reload.MadeDeclared
	st.generation.change(now)
	if st.mode == api.Heal {
		st.declared.retry.At = now
		return
	}
	st.examineAll(now) // how far the claimed chains are from the declaration
}

// examineAll makes an examination of all families due that have their marks, after a change
// that no look notices.
func (st *state) examineAll(now time.Time) {
	for f, fs := range st.families {
		if st.planted(f) {
			fs.examined.plan(now)
		}
	}
}

// errFlushed: a guarded read of a write that puts back no rules shows a flush.
var errFlushed = errors.New("rules are being flushed, and are put back first")

// apply writes the declared generation where the kernel differs from it. That difference is
// neither a flush nor a drift. A table with a refused rule stays as it is, and the others follow
// the declaration. If rules are flushed at that moment, apply leaves them to heal, because a write
// of apply would put them back without a record.
func (d *Daemon) apply(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	log := klog.FromContext(ctx)
	for f := range st.inOrder() { // an unreadable family makes the write fail, which logs it
		if snapshot, err := d.cfg.Kernel.Read(ctx, f); err == nil {
			d.yieldToOwner(ctx, st, snapshot)
		}
	}
	if st.mode != api.Heal {
		return
	}
	job := d.job(st, d.cfg.Kernel.Families()...)
	job.Generation, job.Claimed = st.declared.now.Generation.Join(st.generation.learned.Generation), st.declared.now.Claims
	job.Strict, job.Refused = true, st.refused.list
	job.Interrupted = func() bool { return d.lostMore(ctx, st) }
	job.Judged = func(_ rules.Family, tables map[rules.TableName]reload.TableResult) error {
		for _, tr := range tables {
			if v := tr.Finding.Verdict; v.Loss() && v != canary.Drifted {
				return errFlushed
			}
		}
		return nil
	}
	result, err := d.replayer(ctx, st).Heal(ctx, job)
	d.takeRefused(ctx, st, result)
	st.takeFirst(result)
	for f, fr := range result {
		d.applyResult(ctx, st, f, fr)
		st.setApplied(f, fr)
		if !errors.Is(fr.Err, errFlushed) { // which is no failed replay
			d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
		}
		d.countRefusal(f, fr.Err)
		err = errors.Join(err, fr.Err)
	}
	d.countLocked(st, result, err)
	st.looking.plan(time.Now())
	if err != nil {
		st.declared.retry.Failed(err, time.Now())
		st.setUnapplied()
		for f := range result {
			st.families[f].examined.plan(st.looking.at) // by the rules in force
		}
		// The next try follows the replay. If it meets the flush again, no examination has found a
		// loss to replay, and the log says so.
		if st.loss != nil || errors.Is(err, errFlushed) && st.declared.retry.Wait <= pace.FirstTry {
			return
		}
		st.declared.trouble.Report(ctx, err, "Not all of the declared generation could be written; the rules in force stay", "retryIn", st.declared.retry.Wait)
		return
	}
	st.declared.trouble.Over()
	st.declared.inForce, st.declared.unapplied = new(st.declared.now), nil
	st.declared.retry = pace.Retry{}
	st.generation.change(time.Now())
	st.disk.saveSoon(time.Now())
	for f, fr := range result {
		if fr.Outcome != reload.Skipped {
			st.families[f].rotation.plan(time.Now())
		}
	}
	want := st.want()
	count, chains := want.Counts()
	severity.Notices(log).Info("The declared generation is in force and proved", "generation", want.ID(), "rules", count, "chains", chains)
}

// setApplied notes the tables of the declaration that a write brought into force. The first
// declaration counts only as a whole: nothing else is a measure for the tables without it.
func (st *state) setApplied(f rules.Family, fr reload.FamilyResult) {
	if st.declared.inForce == nil {
		return
	}
	for t, tr := range fr.Tables {
		if id := f.Table(t); tr.Proved || tr.Read && !tr.Finding.Verdict.Loss() {
			st.declared.inForce = st.declared.inForce.with(st.declared.inForce.Generation.With(id, st.declared.now.Generation[id]))
			st.declared.inForce.Origin = st.declared.now.Origin
		}
	}
	st.generation.change(time.Now())
}

// setUnapplied notes the tables in which the declaration is not in force after a failed write,
// for the status.
func (st *state) setUnapplied() {
	st.declared.unapplied = map[rules.TableID]bool{}
	for id := range st.tables() {
		st.declared.unapplied[id] = st.declared.inForce == nil || !st.declared.now.Generation[id].Equal(st.declared.inForce.Generation[id])
	}
}

// countDrift counts a drift if the finding is one, and gives the claimed chains up if another
// process keeps writing them.
func (d *Daemon) countDrift(ctx context.Context, st *state, finding canary.Finding) {
	if finding.Verdict != canary.Drifted || st.mode != api.Heal || st.loss != nil {
		return
	}
	now := time.Now()
	st.declared.drifts = append(st.declared.drifts, now)
	st.declared.drifts = slices.DeleteFunc(st.declared.drifts, func(t time.Time) bool { return now.Sub(t) > driftWindow })
	log := klog.FromContext(ctx)
	differences := finding.Drift.Lines()
	severity.Warnings(log).Info("Claimed chains are not as declared", "differences", differences[:min(flushes.NamesKept, len(differences))])
	if len(st.declared.drifts) > driftsKept {
		d.giveUp(ctx, st, "another process keeps changing the chains that the declared source claims")
	}
}

// yieldToOwner gives the claimed chains up if a read shows that their real owner is at work.
func (d *Daemon) yieldToOwner(ctx context.Context, st *state, snapshot iptables.Snapshot) {
	if st.declared.now.Generation == nil || st.mode != api.Heal {
		return
	}
	if owner := reload.OtherOwner(snapshot, st.declared.now.Claims); owner != "" {
		d.giveUp(ctx, st, owner)
	}
}

// giveUp drops to observe mode for the rest of this run, because another program owns the
// claimed chains (reason).
func (d *Daemon) giveUp(ctx context.Context, st *state, reason string) {
	st.mode, st.declared.retry.At, st.declared.unapplied = api.Observe, time.Time{}, nil
	st.refused.list = nil // observe mode writes no rule that could be refused
	d.takeRefused(ctx, st, nil)
	st.generation.change(time.Now())
	if st.loss == nil {
		st.examineAll(time.Now())
	}
	st.contention.displaced = true
	klog.FromContext(ctx).Error(errors.New(reason), "canaryd only observes from now on; stop the other writer or use --source=snapshot, and restart canaryd")
}
