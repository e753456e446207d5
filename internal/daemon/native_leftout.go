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
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file has the native tables that are left out, because all native tables together are larger
// than canaryd keeps. canaryd knows such a table by its name and its deeds only.

// probeEvery is the shortest interval between two probes of a table that is left out: many commits
// of its owner look like a flush.
const probeEvery = time.Second

// A nativeLeftOut describes a table that is left out. Its nativeTable has no content.
type nativeLeftOut struct {
	units int       // its size in rules at the last count, which ends where the table is too large
	taken int       // sevenths of rules that commits have taken since: a set's element is one
	next  time.Time // not before: the next count
	// probe is when the parts are probed that a commit took from, or that are lost. Zero: there is
	// no such commit. probed is the time of the last probe.
	probe, probed time.Time
	// fleeting: packets or time may remove elements without a commit. It is counted again although
	// no commit changed it.
	fleeting bool
}

// take notes the deed of a commit. A table that was deleted, or has lost half of its size at the
// last count, is counted without delay.
func (o *nativeLeftOut) take(deed nativeDeed) {
	for _, n := range deed.Rules {
		o.taken += 7 * n
	}
	for _, n := range deed.Elements {
		o.taken += n
	}
	if deed.Deleted || o.lostHalf() {
		o.next = time.Time{}
	}
}

// lostHalf reports whether commits have taken half of the size at the last count.
func (o *nativeLeftOut) lostHalf() bool { return 2*o.taken > 7*o.units }

var errNativeTooMany = errors.New("native tables are larger than canaryd keeps: raise --max-rules and the memory limit, or remove rules and elements that are not needed")

// countAt returns when a table that is left out may be counted again. A deleted table is counted
// as soon as it exists again.
func (t *nativeTable) countAt() time.Time {
	if !t.remains() {
		return time.Time{}
	}
	return t.out.next
}

// remains reports whether a table that is left out exists, and has lost no more than parts.
func (t *nativeTable) remains() bool {
	return !t.accept && (!t.lost() || t.finding.Verdict == native.Emptied)
}

// takeNativeLeftOut notes the tables that a read left out, for status and log. counted are the
// tables that it read, or began to.
func (d *Daemon) takeNativeLeftOut(ctx context.Context, st *state, seen *native.Ruleset, counted map[tableid.TableID]bool, took time.Duration) {
	r, now := &st.native, time.Now()
	for id, w := range seen.LeftOut {
		t := r.tables[id]
		if r.immune[id] || t != nil && t.out != nil && !counted[id] {
			continue
		}
		if t == nil {
			t = &nativeTable{wrote: now}
		}
		if t.out == nil || !t.remains() {
			d.leaveNativeOut(ctx, st, id, t, w)
		}
		t = r.tables[id]
		d.doubtHeld(ctx, st, t)
		t.out.units, t.out.taken = w.Units(), 0
		t.out.next, t.out.fleeting = now.Add(nft.CountAgainAfter(took)), seen.Fleeting[id]
		t.genid, t.read = seen.Genid, seen.At
		if t.out.probe.IsZero() { // else it judges the deeds
			t.dropDeeds(seen.Genid)
		}
		t.rest(false, seen.Genid)
	}
	for id, t := range r.tables {
		if _, left := seen.LeftOut[id]; t.out != nil && !t.lost() && !t.gone() && !left && seen.Tables[id] == nil {
			t.countSoon(now)
		}
	}
}

// dropDeeds drops the deeds of commits up to that genid: the table was judged.
func (t *nativeTable) dropDeeds(genid uint32) {
	t.deeds = slices.DeleteFunc(t.deeds, func(deed nativeDeed) bool { return !nft.Newer(deed.Genid, genid) })
}

// due reports whether the table is to be read: it may differ, or may fit without a commit.
func (t *nativeTable) due() bool {
	return !t.dirty.IsZero() || t.out != nil && t.out.fleeting && t.remains()
}

// leaveNativeOut drops the content of a table that is left out from now on. A loss of the table is
// over: it exists.
func (d *Daemon) leaveNativeOut(ctx context.Context, st *state, id tableid.TableID, t *nativeTable, w nft.Weight) {
	r := &st.native
	emptied := t.finding.Verdict == native.Emptied && !t.accept
	left := &nativeTable{want: &native.Table{ID: id}, deeds: t.deeds, wrote: t.wrote, out: &nativeLeftOut{},
		finding: native.Finding{Verdict: native.Intact}, witness: r.witness[id.Family].Nonce}
	if t.want != nil {
		left.want.Handle = t.want.Handle
		switch {
		case r.loss != nil && r.loss.unswept[id]: // canaryd has written it, and its loss ends so
		case emptied:
			left.finding = native.Finding{Verdict: native.Emptied, Why: t.finding.Why + "; " + errOwnerOnly.Error(), Changes: t.finding.Changes}
			if r.loss != nil && r.loss.hit[id] {
				r.loss.tooLarge = append(r.loss.tooLarge, id.NFT()+": "+left.finding.Why)
			}
		default:
			d.nativeBack(ctx, st, id, true)
		}
		r.disk.moved(time.Now())
	}
	if emptied || len(t.deeds) > 0 {
		left.out.probe = time.Now()
	}
	r.edition++
	if r.tables[id] = left; t.out == nil {
		severity.Warnings(r.comings.log(ctx)).Error(errNativeTooMany, "A native table is left out: it is NOT guarded", "table", id.NFT(), "sizeInRules", w.Units())
	}
	st.quarantine.Plan(id, time.Time{})
	if d.doubtHeld(ctx, st, left); t.out == nil && st.quarantine.Count(id) > 0 {
		severity.Warnings(klog.FromContext(ctx)).Info("Parts in quarantine wait until their native table is not left out any more", "table", id.NFT(), "parts", st.quarantine.Count(id))
		for _, flush := range st.quarantine.Flushes(id) {
			d.endPartial(ctx, st, flush, reload.Partial, fmt.Sprintf("%s has parts in quarantine, which wait because it is too large (--max-rules)", id.NFT()))
		}
	}
}

// doubtHeld drops parts in quarantine of a table that is left out, if a commit may have removed
// them. A table that is not read may have had such a part again. After missed commits the content
// decides when the table is read.
func (d *Daemon) doubtHeld(ctx context.Context, st *state, t *nativeTable) {
	held := st.quarantine.Held(t.want.ID)
	still := slices.DeleteFunc(slices.Clone(held), func(h native.Held) bool {
		return slices.ContainsFunc(t.deeds, func(deed nativeDeed) bool { return deed.MayRemove(h) })
	})
	if n := len(held) - len(still); n > 0 {
		severity.Warnings(klog.FromContext(ctx)).Info("Parts in quarantine are given up", "table", t.want.ID.NFT(), "parts", n, "left", len(still), "because", takenWhileLeftOut)
		d.setQuarantine(ctx, st, t.want.ID, nil, still, quarantine.GivenUp)
	}
}

// takenWhileLeftOut is why parts are given up.
const takenWhileLeftOut = "a commit took rules or elements from where they belong, while the table was left out (--max-rules)"

// probeNative judges a table that is left out, by the deeds of commits and a probe of the parts
// that they took from. A lost part cannot be put back. Its owner has to write it, or a person
// accepts the loss.
func (d *Daemon) probeNative(ctx context.Context, st *state, id tableid.TableID) {
	t, now := st.native.tables[id], time.Now()
	genid, err := d.hearNow(ctx, st)
	var deeds []*native.Deed
	for _, deed := range t.deeds {
		deeds = append(deeds, deed.Deed)
	}
	var g native.Probe
	if err == nil {
		g, err = d.cfg.Native.Kernel.Probe(id, native.Parts(deeds, t.finding))
	}
	if err != nil || g.Genid != genid { // mostly, a commit came between
		if t.out.probe = now.Add(quarantine.OwnersPause); err != nil && !errors.Is(err, nft.ErrInterrupted) {
			d.nativeUnknown(ctx, st, err)
		}
		return
	}
	t.out.probe, t.out.probed = time.Time{}, now
	if g.Table == nil || !t.remains() { // a read judges it
		return
	}
	seen := nativeSight{Ruleset: &native.Ruleset{Genid: genid, Tables: map[tableid.TableID]*native.Table{id: g.Table}}, used: g.Used}
	f := d.judgeNative(id, t, seen, nil)
	switch {
	case f.Verdict == native.Emptied:
		if t.finding.Lasts(g.Table) {
			d.logMoreLost(ctx, st, id, f.Changes[len(t.finding.Changes):])
		} else if t.lost() { // the earlier parts are back
			d.nativeBack(ctx, st, id, true)
		}
		t.finding = f
		d.reportNative(ctx, st, id, nil)
	case t.lost():
		d.nativeBack(ctx, st, id, true)
		t.finding = native.Finding{Verdict: native.Intact}
	}
	d.doubtHeld(ctx, st, t)
	t.dropDeeds(genid)
	st.native.disk.changed(now)
}

// logMoreLost logs the parts that a table lost while it waited for a decision. Its record keeps the
// parts of the first loss.
func (d *Daemon) logMoreLost(ctx context.Context, st *state, id tableid.TableID, lost []native.Change) {
	w := st.native.waiting[id]
	if w == nil || len(lost) == 0 {
		return
	}
	var parts []string
	for _, c := range lost[:min(len(lost), flushes.NamesKept)] {
		parts = append(parts, c.String())
	}
	severity.Warnings(klog.FromContext(ctx)).Info("A native table that waits for a decision has lost more", "flush", w.ID, "table", id.NFT(),
		"parts", parts, "more", len(lost)-len(parts), "acceptTheLoss", dismissCommand)
}

// leaveUnproved notes that a table was written and is left out of the proof: it became too large
// meanwhile. The record and the log say so.
func (d *Daemon) leaveUnproved(ctx context.Context, st *state, id tableid.TableID) {
	l := st.native.loss
	flush := l.record.ID
	l.unproved = true
	delete(l.unswept, id)
	err := fmt.Errorf("%s: %w", id.NFT(), nativestore.ErrNotProved)
	l.tooLarge = append(l.tooLarge, err.Error())
	if w := st.native.waiting[id]; w != nil {
		w.Detail, flush = err.Error(), w.ID
	}
	severity.Warnings(klog.FromContext(ctx)).Error(err, "A native table was written, and its content is not known", "flush", flush)
}

// returned notes that a table which was left out is guarded again.
func (t *nativeTable) returned(log klog.Logger, now *native.Table) {
	chains, rules, elements := now.Counts()
	log = log.WithValues("table", now.ID.NFT(), "chains", chains, "rules", rules, "elements", elements)
	if t.out.lostHalf() && 2*(7*rules+elements) < 7*t.out.units { // its owner has not only rewritten it
		severity.Warnings(log).Info("A native table that was left out is guarded again, without most of its rules and elements; its owner has to check it")
	} else {
		severity.Notices(log).Info("A native table is no longer left out")
	}
	t.out = nil
}

// countSoon has a table that is left out counted at once. Another table has shrunk, by a commit
// or by itself, so that this one may fit.
func (t *nativeTable) countSoon(now time.Time) {
	t.out.next = now
	t.touch(now, now, false)
}

// knowsAll reports whether the content of all tables that are kept is known.
func (r *nativeRealm) knowsAll() bool {
	return r.begun && !r.all && !r.fresh && !anyOf(r.tables, func(t *nativeTable) bool { return t.out == nil && !t.dirty.IsZero() })
}

// leftOut returns the existing tables that are left out, for a Status.
func (r *nativeRealm) leftOut() (list []api.NativeLeftOut) {
	for _, id := range r.ids() {
		if t := r.tables[id]; t.out != nil && t.remains() {
			list = append(list, api.NativeLeftOut{Family: id.Family.NFT(), Table: id.NFT(), Rules: t.out.units})
		}
	}
	return list
}
