package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Two programs that both think that they own a chain undo each other for ever.
// Claimed chains that drift more than driftsKept times within driftWindow are
// somebody else's, and canaryd only observes from then on.
const (
	driftWindow = time.Minute
	driftsKept  = 3
)

// apply writes the declared generation where the kernel differs from it. That
// is no flush and no drift: it is what the declaration asks for.
func (d *Daemon) apply(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	log := klog.FromContext(ctx)
	result, err := d.replayer.Heal(ctx, d.job(st, d.cfg.Kernel.Families()...))
	for f, fr := range result {
		d.absorb(st, f, fr)
		d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
		d.countRefusal(f, fr.Err)
		if !fr.Outcome.Done() {
			err = errors.Join(err, fr.Err)
		}
	}
	st.lookAt = time.Now()
	if err != nil {
		st.applyWait = min(max(2*st.applyWait, firstTry), lastTry)
		st.applyAt = time.Now().Add(st.applyWait)
		log.Error(err, "The declared generation could not be written; what was in force stays", "retryIn", st.applyWait)
		return
	}
	st.applyAt, st.applyWait = time.Time{}, 0
	st.saveAt = earliest(st.saveAt, time.Now().Add(saveQuiet))
	for f := range result {
		st.families[f].planRotation(time.Now())
	}
	want := st.want()
	count, chains := want.Counts()
	log.Info("The declared generation is in force and proved", "generation", want.ID(), "rules", count, "chains", chains)
}

// noteDrift counts drifts and gives the claimed chains up if somebody else
// keeps writing them.
func (d *Daemon) noteDrift(ctx context.Context, st *state, finding canary.Finding) {
	if finding.Verdict != canary.Drifted || st.mode != Heal || st.loss != nil {
		return
	}
	now := time.Now()
	st.drifts = append(st.drifts, now)
	st.drifts = slices.DeleteFunc(st.drifts, func(t time.Time) bool { return now.Sub(t) > driftWindow })
	log := klog.FromContext(ctx)
	log.Info("Claimed chains are not as declared", "differences", finding.Drift[:min(namesKept, len(finding.Drift))])
	if len(st.drifts) > driftsKept {
		d.giveUp(ctx, st, "somebody keeps changing the chains that the declared source claims")
	}
}

// noteOwner gives the claimed chains up if their real owner turns out to be at
// work.
func (d *Daemon) noteOwner(ctx context.Context, st *state, snapshot iptables.Snapshot) {
	if st.declared == nil || st.mode != Heal {
		return
	}
	if owner := reload.OtherOwner(snapshot, d.cfg.Claims); owner != "" {
		d.giveUp(ctx, st, owner)
	}
}

// giveUp drops to observe mode for the rest of this run.
func (d *Daemon) giveUp(ctx context.Context, st *state, reason string) {
	st.mode, st.applyAt = Observe, time.Time{}
	d.cfg.Metrics.SetContended(true)
	klog.FromContext(ctx).Error(errors.New(reason), "canaryd only observes from now on; stop the other writer or use --source=snapshot, and restart canaryd")
}

// unclaimed returns the generation without what declared sources own.
func (d *Daemon) unclaimed(g rules.Generation) rules.Generation {
	for f, tables := range g {
		for t, s := range tables {
			_, rest := s.Split(d.cfg.Claims)
			g = g.With(f, t, rest)
		}
	}
	return g
}
