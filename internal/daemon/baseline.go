package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
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

// content returns everything that ought to be in force, for a comparison with the baseline.
func (d *Daemon) content(st *state) baseline.Content {
	r := &st.native
	now := baseline.Content{Generation: st.want(), Native: map[tableid.TableID]*native.Table{}, Unread: d.guardsNative() && !r.begun && !r.asleep}
	for id := range r.immune {
		now.Native[id] = nil
	}
	for id, t := range r.tables {
		if now.Native[id] = t.want; t.out != nil {
			now.Native[id] = nil
		}
	}
	return now
}

// contentEdition changes with each change of content.
func (st *state) contentEdition() int {
	n := st.generation.edition + st.native.edition
	if st.native.begun {
		n++
	}
	return n
}

// compareAt returns when the content is to be compared with the baseline.
func (d *Daemon) compareAt(st *state) time.Time {
	return st.baseline.CompareAt(st.contentEdition(), d.made)
}

// compareBaseline compares the content with the baseline, if it has changed since: the status
// shows the rules that are new.
func (d *Daemon) compareBaseline(st *state) {
	if edition := st.contentEdition(); st.baseline.Behind(edition) {
		st.baseline.Compare(edition, d.content(st))
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

// Baseline shows the baseline, confirms one, or forgets it. Only displays depend on it.
func (d *Daemon) Baseline(ctx context.Context, r api.BaselineRequest) (api.BaselineReply, error) {
	if err := d.awaitBaseline(ctx); err != nil {
		return api.BaselineReply{}, err
	}
	switch {
	case r.Confirm && r.Forget || r.Generation != "" && !r.Confirm:
		return api.BaselineReply{}, errors.New("a baseline is shown, confirmed (with generations or without), or forgotten")
	case (r.Confirm || r.Forget) && d.cfg.Store == nil:
		return api.BaselineReply{}, errors.New("no state folder is in use, so a baseline cannot be kept")
	case r.Confirm:
		return d.confirmBaseline(ctx, r.Generation)
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

// confirmBaseline writes the generations of these IDs as the baseline, or everything that ought to
// be in force if there are none. The loop keeps running meanwhile: at 5,000 services the write
// takes half a second.
func (d *Daemon) confirmBaseline(ctx context.Context, ids string) (api.BaselineReply, error) {
	d.confirming.Lock()
	defer d.confirming.Unlock()
	var c confirmation
	err := d.askGuard(ctx, func(_ context.Context, st *state) error {
		c.present = d.content(st)
		if !st.allPlanted() || st.generation.captured.IsZero() || c.present.Unread {
			return errors.New("canaryd has not read every table yet")
		}
		c.captured, c.ids = st.generation.captured, map[string]*native.Table{}
		for id, t := range c.present.Native {
			if t != nil {
				c.ids[nativestore.IDOf(st.native.tables[id].digest)] = t
			}
		}
		return nil
	})
	if err != nil {
		return api.BaselineReply{}, err
	}
	next, err := d.confirmed(c, ids)
	if err != nil {
		return api.BaselineReply{}, err
	}
	next.Confirmed = time.Now()
	if next, err = d.cfg.Store.SaveBaseline(next); err != nil {
		return api.BaselineReply{}, err
	}
	known := baseline.Of(next, nil)
	return d.setBaseline(ctx, &known)
}

// A confirmation has the content that an operator may confirm.
type confirmation struct {
	present  baseline.Content
	captured time.Time                // when its generation was learned
	ids      map[string]*native.Table // its native tables, by the IDs of their generations
}

// confirmed returns the baseline that an operator confirms by these IDs. Tables without an ID
// among them, and tables whose content is not known, keep their part of the present baseline.
func (d *Daemon) confirmed(c confirmation, ids string) (reload.Baseline, error) {
	next, err := d.cfg.Store.LoadBaseline()
	if err != nil {
		next = reload.Baseline{Generation: rules.Generation{}} // there is none, or this one replaces it
	}
	if ids == "" {
		next.Captured, next.Generation = c.captured, c.present.Generation
		next.Native = slices.DeleteFunc(next.Native, func(t reload.ConfirmedTable) bool {
			_, exists := c.present.Native[t.Family.Table(t.Table)]
			return !exists
		})
		for _, id := range slices.SortedFunc(maps.Keys(c.present.Native), tableid.TableID.Compare) {
			if t := c.present.Native[id]; t != nil {
				next = baseline.With(next, t)
			}
		}
		return next, nil
	}
	named := map[tableid.TableID]bool{}
	for prefix := range strings.SplitSeq(ids, ",") {
		id, err := d.fullID(prefix)
		if err != nil {
			return reload.Baseline{}, err
		}
		var of tableid.TableID
		t, err := d.nativeOf(c, id)
		switch {
		case err != nil:
			return reload.Baseline{}, err
		case t != nil:
			of, next = t.ID, baseline.With(next, t)
		case id == c.present.Generation.ID():
			next.Captured, next.Generation = c.captured, c.present.Generation
		default:
			stored, _, err := d.cfg.Store.Show(id)
			if errors.Is(err, reload.ErrNothingStored) {
				return reload.Baseline{}, fmt.Errorf("%w: %s is not in force any more and is not stored; `canaryd baseline` shows the present ones", api.ErrNoGeneration, id)
			}
			if err != nil {
				return reload.Baseline{}, err
			}
			next.Captured, next.Generation = stored.Captured, stored.Generation
		}
		if named[of] {
			return reload.Baseline{}, fmt.Errorf("two of the generations %s are of the same tables", ids)
		}
		named[of] = true
	}
	return next, nil
}

// nativeOf returns the native table of a generation's ID, in force or stored; nil if the ID is of no
// native table.
func (d *Daemon) nativeOf(c confirmation, id string) (*native.Table, error) {
	if t := c.ids[id]; t != nil {
		return t, nil
	}
	stored, _, err := d.nativeGeneration(id)
	return stored.Table, err
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
		d.compareBaseline(st)
		reply.Baseline, reply.Present = st.baseline.Public(), d.generation(st)
		reply.Present.ID = d.generationID()
		reply.Generations = []string{reply.Present.ID}
		now := d.content(st)
		for _, id := range st.native.ids() {
			if now.Native[id] != nil {
				reply.Generations = append(reply.Generations, nativestore.IDOf(st.native.tables[id].digest))
				reply.NativeTables++
			}
		}
		st.baseline.List(&reply, now)
		d.publish(st)
	})
	return reply, err
}
