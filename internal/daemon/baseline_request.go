package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// What a reply quotes of rules. A chain gets a tenth of it at most: one that
// is filled up hides no other.
const (
	baselineChains = 2000
	baselineLines  = 5000
	baselineBytes  = 2 << 20
)

// awaitBaseline waits until what the disk has is taken up.
func (d *Daemon) awaitBaseline(ctx context.Context) error {
	select {
	case <-d.baselineTaken:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Baseline shows the baseline, or confirms or forgets it. Nothing but what is shown depends on it.
func (d *Daemon) Baseline(ctx context.Context, r api.BaselineRequest) (api.BaselineReply, error) {
	if err := d.awaitBaseline(ctx); err != nil {
		return api.BaselineReply{}, err
	}
	switch {
	case r.Confirm && r.Forget || r.Generation != "" && !r.Confirm:
		return api.BaselineReply{}, errors.New("a baseline is shown, confirmed (one generation at most), or forgotten")
	case (r.Confirm || r.Forget) && d.cfg.Store == nil:
		return api.BaselineReply{}, errors.New("no state folder is in use, so a baseline cannot be kept")
	case r.Confirm:
		id, err := d.fullID(r.Generation)
		if err != nil {
			return api.BaselineReply{}, err
		}
		return d.confirmBaseline(ctx, id)
	case r.Forget:
		d.confirming.Lock()
		defer d.confirming.Unlock()
		if err := d.cfg.Store.ForgetBaseline(); err != nil {
			return api.BaselineReply{}, err
		}
		return d.setBaseline(ctx, &baseline{taken: true})
	default:
		return d.setBaseline(ctx, nil)
	}
}

// confirmBaseline writes a generation as the baseline. The loop goes on meanwhile: at 5,000
// services it takes half a second.
func (d *Daemon) confirmBaseline(ctx context.Context, id string) (api.BaselineReply, error) {
	d.confirming.Lock()
	defer d.confirming.Unlock()
	next := reload.Baseline{Confirmed: time.Now()}
	err := d.askGuard(ctx, func(_ context.Context, st *state) error {
		if !st.allPlanted() || st.generation.captured.IsZero() {
			return errors.New("not every table has been read yet, so what stands in all of them is not known")
		}
		next.Captured, next.Generation = st.generation.captured, st.want()
		return nil
	})
	if err != nil {
		return api.BaselineReply{}, err
	}
	if id != "" && id != next.Generation.ID() {
		stored, _, err := d.cfg.Store.Show(id)
		if errors.Is(err, reload.ErrNothingStored) {
			return api.BaselineReply{}, fmt.Errorf("%w: %s is not in force any more and is not stored; `canaryd baseline` shows the present one", api.ErrNoGeneration, id)
		}
		if err != nil {
			return api.BaselineReply{}, err
		}
		next.Captured, next.Generation = stored.Captured, stored.Generation
	}
	if next, err = d.cfg.Store.SaveBaseline(next); err != nil {
		return api.BaselineReply{}, err
	}
	confirmed := baselineOf(next, nil)
	return d.setBaseline(ctx, &confirmed)
}

// setBaseline has the loop compare with another baseline, unless it is nil, and says what that
// shows.
func (d *Daemon) setBaseline(ctx context.Context, next *baseline) (api.BaselineReply, error) {
	var reply api.BaselineReply
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if next != nil {
			reply.Replaced = st.baseline.name()
			st.baseline = *next
			log := klog.FromContext(ctx)
			if next.base == nil {
				severity.Notices(log).Info("The baseline was forgotten on request")
			} else {
				severity.Notices(log).Info("A baseline was confirmed on request", "generation", next.stored.ID, "rules", next.stored.Rules, "chains", next.stored.Chains)
			}
		}
		st.compareBaseline()
		reply.Baseline, reply.Present = st.baseline.public(), d.generation(st)
		listChanges(&reply, st.baseline.changes)
		d.publish(st)
	})
	return reply, err
}

// listChanges puts chains that differ into a reply, as long as there is room.
func listChanges(r *api.BaselineReply, changes []rules.ChainChange) {
	rank := func(c rules.ChainChange) int {
		switch {
		case rules.Builtin(c.Table, c.Chain):
			return 0
		case c.Known:
			return 1
		default:
			return 2
		}
	}
	changes = slices.Clone(changes)
	slices.SortStableFunc(changes, func(a, b rules.ChainChange) int { return rank(a) - rank(b) })
	left := flushes.Room{Lines: baselineLines, Bytes: baselineBytes}
	for i, c := range changes {
		if i == baselineChains {
			r.More = len(changes) - i
			return
		}
		w := flushes.DiffWriter{Room: flushes.Room{Lines: min(left.Lines, baselineLines/10), Bytes: min(left.Bytes, baselineBytes/10)}}
		w.Rules("", c.Chain, c.Appeared)
		left.Lines -= len(w.Diff.Lines)
		for _, line := range w.Diff.Lines {
			left.Bytes -= len(line)
		}
		r.Changes = append(r.Changes, api.BaselineChange{
			Family: c.Family, Table: c.Table, Chain: c.Chain, Known: c.Known, Appeared: len(c.Appeared), Gone: c.Gone, Reordered: c.Reordered,
			Rules: w.Diff.Lines, More: w.Diff.More,
		})
	}
}
