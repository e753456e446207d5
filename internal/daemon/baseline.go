package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

// canaryd learns the rules of protected chains, whichever process wrote them, and puts them
// back after a flush. A baseline shows an operator the rules that are new since the last
// confirmation. No verdict, no replay and no refusal depends on it.

// loadBaseline reads the baseline in a goroutine of its own at the start, so that no flush
// waits for that; takeBaseline takes it.
func (d *Daemon) loadBaseline() baseline.Known {
	if d.cfg.Store == nil {
		return baseline.None()
	}
	return baseline.Of(d.cfg.Store.LoadBaseline())
}

// takeBaseline takes the baseline from disk into the state, and lets the requests go on that
// wait for it (baselineTaken).
func (d *Daemon) takeBaseline(ctx context.Context, st *state, read baseline.Known) {
	defer close(d.baselineTaken)
	st.baseline = read
	if read.Err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(read.Err, "The confirmed baseline cannot be used; canaryd does not show which rules appeared since, and nothing else depends on it",
			"confirmAgain", "canaryd baseline --confirm", "forgetIt", "canaryd baseline --forget")
	}
}

// compareAt returns when the generation is to be compared with the baseline.
func (d *Daemon) compareAt(st *state) time.Time {
	return st.baseline.CompareAt(st.generation.edition, d.made)
}

// compareBaseline compares the generation with the baseline, if it has changed since: the
// status shows the rules that are new.
func (st *state) compareBaseline() {
	if edition := st.generation.edition; st.baseline.Behind(edition) {
		st.baseline.Compare(edition, st.want())
	}
}

// awaitBaseline waits until the loop has the baseline from disk, for requests that depend on
// it: Baseline, and dry runs of Restore.
func (d *Daemon) awaitBaseline(ctx context.Context) error {
	select {
	case <-d.baselineTaken:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Baseline shows the baseline, confirms a generation as one, or forgets it. Only displays
// depend on it.
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
		none := baseline.None()
		return d.setBaseline(ctx, &none)
	default:
		return d.setBaseline(ctx, nil)
	}
}

// confirmBaseline writes the generation of that ID as the baseline, the present one if the ID
// is "". The loop keeps running meanwhile: at 5,000 services the write takes half a second.
func (d *Daemon) confirmBaseline(ctx context.Context, id string) (api.BaselineReply, error) {
	d.confirming.Lock()
	defer d.confirming.Unlock()
	next := reload.Baseline{Confirmed: time.Now()}
	err := d.askGuard(ctx, func(_ context.Context, st *state) error {
		if !st.allPlanted() || st.generation.captured.IsZero() {
			return errors.New("canaryd has not read every table yet")
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
	confirmed := baseline.Of(next, nil)
	return d.setBaseline(ctx, &confirmed)
}

// setBaseline has the loop compare with another baseline, unless next is nil, and returns the
// result as the reply: Baseline and confirmBaseline end with it.
func (d *Daemon) setBaseline(ctx context.Context, next *baseline.Known) (api.BaselineReply, error) {
	var reply api.BaselineReply
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if next != nil {
			reply.Replaced = st.baseline.Name()
			st.baseline = *next
			log := klog.FromContext(ctx)
			next.LogSet(log)
		}
		st.compareBaseline()
		reply.Baseline, reply.Present = st.baseline.Public(), d.generation(st)
		reply.Present.ID = d.generationID()
		st.baseline.List(&reply)
		reply.NativeTables = len(st.native.tables)
		d.publish(st)
	})
	return reply, err
}
