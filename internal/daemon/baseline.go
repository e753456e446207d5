package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
func (d *Daemon) content(st *state) *baseline.Content {
	r := &st.native
	now := &baseline.Content{Generation: st.want(), Native: map[tableid.TableID]*native.Table{}, Unread: d.guardsNative() && !r.begun && !r.asleep}
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
	c := confirmation{ids: map[string]*native.Table{}, named: map[string]bool{}}
	err := d.askGuard(ctx, func(_ context.Context, st *state) error {
		c.present, c.captured = d.content(st), st.generation.captured
		if !st.allPlanted() || c.captured.IsZero() || c.present.Unread {
			return errors.New("canaryd has not read every table yet")
		}
		for id, t := range c.present.Native {
			if t != nil {
				c.ids[nativestore.IDOf(st.native.tables[id].digest)] = t
			}
		}
		return nil
	})
	if err == nil {
		if c.next, err = d.cfg.Store.LoadBaseline(); err != nil || c.next.Native == nil {
			c.next.Native = map[string]map[string][]byte{} // there is none, or this one replaces it
		}
		if err = d.confirmAll(&c, ids); err == nil {
			c.next.Confirmed = time.Now()
			c.next, err = d.cfg.Store.SaveBaseline(c.next)
		}
	}
	if err != nil {
		return api.BaselineReply{}, err
	}
	known := baseline.Of(c.next, nil)
	return d.setBaseline(ctx, &known)
}

// A confirmation has the content that an operator may confirm, and the next baseline. Tables
// without an ID that the operator names, and tables whose content is not known, keep their part of
// the present baseline.
type confirmation struct {
	present  *baseline.Content
	captured time.Time                // when its generation was learned
	ids      map[string]*native.Table // its native tables, by the IDs of their generations
	next     reload.Baseline
	named    map[string]bool // the tables that the operator has named, "" for iptables'
}

// confirmAll puts the generations of these IDs into the next baseline, or everything if there are
// none.
func (d *Daemon) confirmAll(c *confirmation, ids string) error {
	if ids == "" {
		c.next.Captured, c.next.Generation = c.captured, c.present.Generation
		exists := map[string]bool{}
		for id, t := range c.present.Native {
			if exists[id.NFT()] = true; t != nil {
				c.next.Native[id.NFT()] = baseline.Confirm(t)
			}
		}
		maps.DeleteFunc(c.next.Native, func(table string, _ map[string][]byte) bool { return !exists[table] })
		return nil
	}
	if c.next.Generation == nil {
		c.next.Generation = rules.Generation{}
	}
	for _, prefix := range strings.Split(ids, ",") {
		id, err := d.fullID(prefix)
		if err == nil {
			err = d.confirmOne(c, id)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// confirmOne puts the generation of one ID, in force or stored, into the next baseline.
func (d *Daemon) confirmOne(c *confirmation, id string) error {
	name := ""
	stored, _, err := d.nativeGeneration(id)
	t := stored.Table
	if present := c.ids[id]; present != nil {
		t, err = present, nil
	}
	switch {
	case err != nil:
		return err
	case t != nil:
		name = t.ID.NFT()
		c.next.Native[name] = baseline.Confirm(t)
	case id == c.present.Generation.ID():
		c.next.Captured, c.next.Generation = c.captured, c.present.Generation
	default:
		stored, _, err := d.cfg.Store.Show(id)
		if errors.Is(err, reload.ErrNothingStored) {
			return fmt.Errorf("%w: %s is not in force any more and is not stored; `canaryd baseline` shows the present ones", api.ErrNoGeneration, id)
		}
		if err != nil {
			return err
		}
		c.next.Captured, c.next.Generation = stored.Captured, stored.Generation
	}
	if c.named[name] {
		return fmt.Errorf("generation %s is of the same tables as another one", id)
	}
	c.named[name] = true
	return nil
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
