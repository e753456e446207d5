package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// hold makes held the table's parts in quarantine, and plans to save that. If there are more
// than before, readmitNative soon tries them; if no table has any, it stops.
func (d *Daemon) hold(st *state, t *nativeTable, held []native.Held) {
	r, now := &st.native, time.Now()
	switch grown := len(held) > len(t.held); {
	case len(held) == 0 && len(t.held) == 0:
		return
	case grown:
		r.readmit.In(pace.FirstTry, now)
	}
	t.held = held
	if !anyOf(r.tables, (*nativeTable).readmits) {
		r.readmit = pace.Retry{}
	}
	r.disk.changed(now)
}

// readmits reports whether the table has parts in quarantine that readmitNative tries. Parts of a
// table that is left out wait.
func (t *nativeTable) readmits() bool { return len(t.held) > 0 && t.out == nil }

// holdOn updates the quarantine after an owner has changed its table. A table that the owner
// made again, or a chain that it wrote again, counts as the owner's decision.
func (d *Daemon) holdOn(ctx context.Context, st *state, t *nativeTable, now nativeLearned) {
	var still []native.Held
	if t.want.Handle == now.Table.Handle {
		_, _, still = now.Table.With(t.held)
	}
	if n := len(t.held) - len(still); n > 0 {
		severity.Notices(klog.FromContext(ctx)).Info("Parts of a native table left the quarantine: a write put them or others in their place, or removed it", "table", now.id.NFT(), "parts", n, "left", len(still))
	}
	d.hold(st, t, still)
	if len(still) > 0 { // an owner that writes one by one may be about to write them
		st.native.readmit.At = pace.Earliest(st.native.readmit.At, time.Now().Add(ownersPause))
		return
	}
	d.completeNative(ctx, st, t)
}

// holdRefused puts the parts that a proved repair left out into quarantine, next to the earlier
// ones (before). If there are any, the loss ends as partial.
func (d *Daemon) holdRefused(ctx context.Context, st *state, repair native.Repair, before []native.Held) {
	id := repair.Want.ID
	t := st.native.tables[id]
	_, _, still := t.want.With(before)
	refused := repair.Held()
	logHeld(ctx, id, refused)
	if l := st.native.loss; l != nil && len(refused) > 0 {
		l.partial = true
		t.heldFor = l.record.ID
	}
	d.hold(st, t, slices.Concat(still, nativestore.Lasting(refused)))
}

// logHeld logs the parts that a replay or a restore left out of a native table.
func logHeld(ctx context.Context, id tableid.TableID, held []native.Held) {
	log, waiting := klog.FromContext(ctx), 0
	missing := slices.DeleteFunc(slices.Clone(held), func(h native.Held) bool { return h.Waits })
	for _, h := range missing[:min(flushes.NamesKept, len(missing))] {
		next := "it is tried again"
		if h.Fleeting {
			next = "its time is running out, and it is not tried again"
		}
		severity.Errors(log).Info(partHeld, "table", id.NFT(), "part", h.Text, "reason", h.Why, "next", next)
	}
	if waiting = len(held) - len(missing); waiting > 0 {
		first := held[slices.IndexFunc(held, func(h native.Held) bool { return h.Waits })]
		severity.Errors(log).Info(rulesWait, "table", id.NFT(), "rules", waiting, "chain", first.Name, "reason", first.Why, "next", waitNext)
	}
	if more := len(missing) - flushes.NamesKept; more > 0 {
		severity.Errors(log).Info("More parts of a table are in quarantine", "table", id.NFT(), "parts", more)
	}
}

// mayWriteNative reports whether native tables may be written and no replay is due.
func mayWriteNative(st *state) bool { return st.native.loss == nil && st.heals() }

// readmitNative puts parts of native tables back that are in quarantine, as far as the kernel
// takes them by now. A part that it still refuses costs no commit.
func (d *Daemon) readmitNative(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	r := &st.native
	r.readmit.Failed(nil, time.Now())
	for _, id := range r.ids() {
		if t := r.tables[id]; !t.readmits() || t.lost() || t.old {
			continue
		}
		if err := d.readmitTable(ctx, st, id); err != nil {
			klog.FromContext(ctx).V(1).Info("Parts in quarantine could not be put back yet", "table", id.NFT(), "reason", err)
			if errors.Is(err, nft.ErrStale) || errors.Is(err, nft.ErrInterrupted) {
				r.readmit.In(pace.FirstTry, time.Now())
			}
		}
	}
	if !anyOf(r.tables, (*nativeTable).readmits) { // their owners have deleted them
		r.readmit = pace.Retry{}
	}
	r.planReads(time.Now())
}

// readmitTable is readmitNative for one table. After an error, or a write without proof, a read
// judges the table, or the next try follows.
func (d *Daemon) readmitTable(ctx context.Context, st *state, id tableid.TableID) error {
	r := &st.native
	seen, err := d.sightNative(ctx, st, d.cfg.Native.Kernel.Follow, func(other tableid.TableID) bool { return other == id })
	if err != nil {
		return err
	}
	t, f := r.tables[id], seen.findings[id]
	switch {
	case t == nil: // one process owns it now
		return nil
	case nativestore.Lost(f.Verdict) || seen.Tables[id] == nil:
		t.touch(time.Now(), time.Now(), true) // a read judges it
		return nil
	case f.Verdict == native.Changed:
		d.adoptNative(ctx, st, id, seen, f)
	}
	repair, still := native.Admission(seen.Tables[id], t.held)
	d.hold(st, t, still)
	if len(still) == 0 {
		d.completeNative(ctx, st, t)
		return nil
	}
	repairs := []native.Repair{repair}
	if _, err := d.cfg.Native.Kernel.Write(seen.Genid, repairs, nil); err != nil {
		return err
	}
	left := repairs[0].Held()
	if len(left) >= len(still) { // nothing was written
		return nil
	}
	proof, err := d.cfg.Native.Kernel.Capture(func(t nft.Table) bool { return t.Family.Table(t.Name) == id })
	if err == nil {
		err = d.hearNative(ctx, st, proof.Genid)
	}
	if err == nil {
		d.takeNativeLeftOut(ctx, st, proof, nil, 0)
	}
	switch {
	case err != nil:
		t.touch(time.Now(), time.Now(), true)
		return err
	case r.tables[id] != t: // it is left out
		return nativestore.ErrNotProved
	case !repairs[0].Repaired(proof.Tables[id], false):
		t.touch(time.Now(), time.Now(), true)
		return nativestore.ErrNotInForce
	}
	t.held = nil // its owner has decided nothing
	d.adopt(ctx, st, nativeSight{Ruleset: proof}.learned(id))
	t.held = still
	d.hold(st, t, left)
	severity.Notices(klog.FromContext(ctx)).Info(partsBack, "table", id.NFT(), "parts", len(still)-len(left), "left", len(left))
	if len(left) == 0 {
		d.completeNative(ctx, st, t)
	}
	return nil
}

// holdsFor reports whether a native table has a part in quarantine that this flush took.
func (r *nativeRealm) holdsFor(flush string) bool {
	return anyOf(r.tables, func(t *nativeTable) bool { return t.heldFor == flush && len(t.held) > 0 })
}

// completeNative ends the record of the flush that took the parts of t, when none of its tables
// has a part in quarantine any more. The last part came back, or the owner has decided about
// it. If rules of iptables' tables are missing, too, completeRecords ends the record.
func (d *Daemon) completeNative(ctx context.Context, st *state, t *nativeTable) {
	flush := t.heldFor
	if t.heldFor = ""; flush == "" {
		return
	}
	if !st.native.holdsFor(flush) && !slices.ContainsFunc(st.incomplete, func(r incomplete) bool { return r.id == flush }) {
		d.completeRecord(ctx, st, flush, reload.Proved)
	}
}

// dismissHeld accepts the loss of parts that cannot be put back, and returns how many these
// are. Rules that waited for them are put back as soon as canaryd may write, and it returns how
// many.
func (d *Daemon) dismissHeld(ctx context.Context, st *state) (lost, waiting int) {
	r := &st.native
	for _, id := range r.ids() {
		t := r.tables[id]
		waits := slices.DeleteFunc(slices.Clone(t.held), func(h native.Held) bool { return !h.Waits })
		gone := slices.DeleteFunc(slices.Clone(t.held), func(h native.Held) bool { return h.Waits })
		for _, h := range gone[:min(flushes.NamesKept, len(gone))] {
			severity.Notices(klog.FromContext(ctx)).Info(partAccepted, "table", id.NFT(), "part", h.Text, "reason", h.Why)
		}
		lost, waiting = lost+len(gone), waiting+len(waits)
		d.hold(st, t, waits)
		t.heldFor = ""
	}
	if waiting > 0 {
		r.readmit.In(0, time.Now())
	}
	return lost, waiting
}
