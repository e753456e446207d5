package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Declaration is what the declared sources say at one moment.
type Declaration struct {
	Generation rules.Generation
	// Claims tells which chains the sources own, wanted or not. It must
	// always give the same answer.
	Claims func(chain string) bool
	// Origin says where a rule is declared; a jump's chain is built in. nil: that is
	// not known.
	Origin func(f rules.Family, t rules.TableName, chain string, r rules.Rule) Origin
}

// Two programs that both think that they own a chain undo each other for ever.
// Claimed chains that drift more than driftsKept times within driftWindow are
// somebody else's, and canaryd only observes from then on.
const (
	driftWindow = time.Minute
	driftsKept  = 3
)

// apply writes the declared generation where the kernel differs from it. That
// is no flush and no drift: it is what the declaration asks for. A table with a rule
// that is refused stays as it is, and the others follow the declaration.
func (d *Daemon) apply(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	log := klog.FromContext(ctx)
	if d.lookForOwner(ctx, st); st.mode != api.Heal {
		return
	}
	job := d.job(st, d.cfg.Kernel.Families()...)
	job.Generation, job.Claimed = st.declared.Join(st.learned.Generation), st.claims
	job.Strict, job.Refused = true, st.refusals
	result, err := d.replayer(ctx, st).Heal(ctx, job)
	d.noteRefused(ctx, st, result)
	st.noteFirst(result)
	for f, fr := range result {
		d.applyResult(st, f, fr)
		st.noteApplied(f, fr)
		d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
		d.countRefusal(f, fr.Err)
		if !fr.Outcome.Done() {
			err = errors.Join(err, fr.Err)
		}
	}
	d.countLocked(st, result, err)
	st.lookAt = time.Now()
	if err != nil {
		st.applyWait = longer(st.applyWait)
		if lockReason(err) {
			st.applyWait = firstTry // as when healing: it comes free at any moment
		}
		st.applyAt = time.Now().Add(st.applyWait)
		st.noteUnapplied()
		for f := range result {
			st.families[f].examineAt = st.lookAt // by what is in force
		}
		if st.unwritten.met(err, time.Now()) {
			log.Error(err, "Not all of the declared generation could be written; what was in force stays", "retryIn", st.applyWait)
		}
		return
	}
	st.unwritten.over()
	st.inForce, st.unapplied = &Declaration{st.declared, st.claims, st.origin}, nil
	st.applyAt, st.applyWait = time.Time{}, 0
	st.capture(time.Now())
	st.saveAt = earliest(st.saveAt, time.Now().Add(saveQuiet))
	for f, fr := range result {
		if fr.Outcome != reload.Skipped {
			st.families[f].planRotation(time.Now())
		}
	}
	want := st.want()
	count, chains := want.Counts()
	log.Info("The declared generation is in force and proved", "generation", want.ID(), "rules", count, "chains", chains)
}

// noteApplied takes up what of the declaration a write brought into force. The
// first one counts only as a whole: it is no measure for tables without it.
func (st *state) noteApplied(f rules.Family, fr reload.FamilyResult) {
	if st.inForce == nil {
		return
	}
	for t, tr := range fr.Tables {
		if tr.Proved || tr.Read && !tr.Finding.Verdict.Loss() {
			st.inForce = &Declaration{st.inForce.Generation.With(f.Table(t), st.declared[f.Table(t)]), st.inForce.Claims, st.origin}
		}
	}
	st.capture(time.Now())
}

// noteUnapplied takes up in which tables the declaration is not in force.
func (st *state) noteUnapplied() {
	st.unapplied = map[rules.TableID]bool{}
	for f := range st.families {
		for _, t := range protect.Tables() {
			st.unapplied[f.Table(t)] = st.inForce == nil || !st.declared[f.Table(t)].Equal(st.inForce.Generation[f.Table(t)])
		}
	}
}

// lookForOwner gives the claimed chains up if their real owner is at work.
// What cannot be read now is for the write to complain of.
func (d *Daemon) lookForOwner(ctx context.Context, st *state) {
	for _, f := range d.cfg.Kernel.Families() {
		if snapshot, err := d.cfg.Kernel.Read(ctx, f); err == nil {
			d.noteOwner(ctx, st, snapshot)
		}
	}
}

// noteDrift counts drifts and gives the claimed chains up if somebody else
// keeps writing them.
func (d *Daemon) noteDrift(ctx context.Context, st *state, finding canary.Finding) {
	if finding.Verdict != canary.Drifted || st.mode != api.Heal || st.loss != nil {
		return
	}
	now := time.Now()
	st.drifts = append(st.drifts, now)
	st.drifts = slices.DeleteFunc(st.drifts, func(t time.Time) bool { return now.Sub(t) > driftWindow })
	log := klog.FromContext(ctx)
	differences := finding.Drift.Lines()
	log.Info("Claimed chains are not as declared", "differences", differences[:min(namesKept, len(differences))])
	if len(st.drifts) > driftsKept {
		d.giveUp(ctx, st, "somebody keeps changing the chains that the declared source claims")
	}
}

// noteOwner gives the claimed chains up if their real owner turns out to be at
// work.
func (d *Daemon) noteOwner(ctx context.Context, st *state, snapshot iptables.Snapshot) {
	if st.declared == nil || st.mode != api.Heal {
		return
	}
	if owner := reload.OtherOwner(snapshot, st.claims); owner != "" {
		d.giveUp(ctx, st, owner)
	}
}

// giveUp drops to observe mode for the rest of this run.
func (d *Daemon) giveUp(ctx context.Context, st *state, reason string) {
	st.mode, st.applyAt, st.unapplied = api.Observe, time.Time{}, nil
	d.forgetRefused(ctx, st)
	st.capture(time.Now())
	if st.loss == nil {
		st.compare(time.Now())
	}
	st.displaced = true
	klog.FromContext(ctx).Error(errors.New(reason), "canaryd only observes from now on; stop the other writer or use --source=snapshot, and restart canaryd")
}
