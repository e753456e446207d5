package daemon

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// restoreNative puts back the lost native tables because an operator wants it. It also does so
// in a pause, in observe mode, and for tables that are not put back unasked. A dry run only
// names the tables.
func (d *Daemon) restoreNative(ctx context.Context, st *state, dry bool) []api.NativeRestored {
	r := &st.native
	if !d.guardsNative() {
		return nil
	}
	ctx, done := finishing(ctx)
	defer done()
	if !dry {
		d.nativeByItself(ctx, st)
	}
	if r.asleep {
		return nil
	}
	var scratch *nativeLoss // write and proof need a loss; without a record it is dropped
	defer func() {
		if r.loss == scratch && scratch != nil && !scratch.shown() {
			r.loss = nil
		}
		if r.loss != nil {
			r.loss.asked = false // it ends by another try
		}
	}()
	for id := range r.tables {
		if !dry {
			st.quarantine.Plan(id, time.Now())
		}
	}
	asked := nativeAsked{wanted: map[tableid.TableID]*native.Table{}, back: map[tableid.TableID]api.Outcome{}, less: map[tableid.TableID]error{}, lacks: map[tableid.TableID]int{}}
	defer func() { d.leaveAsked(st, asked, dry) }()
	var last error
	for range nativestore.Tries {
		var plan nativePlan
		plan, last = d.planNative(ctx, st, r.mayBeLost, true)
		asked.take(plan)
		if d.endBack(ctx, st, nil); r.loss == nil {
			scratch = &nativeLoss{answer: newAnswer(api.Flush{}, time.Now()), hit: map[tableid.TableID]bool{}}
			r.loss = scratch
		}
		for _, repair := range plan.repairs {
			if dry {
				asked.lacks[repair.Want.ID] = st.baseline.Base.LacksLost(flushes.LostTable{Want: repair.Want, Now: repair.Now})
			}
		}
		if last != nil || dry || len(plan.repairs) == 0 {
			break
		}
		d.recordAsked(ctx, st, plan.repairs)
		r.loss.asked = true
		var written []native.Repair
		written, last = d.replayNative(ctx, st, plan)
		d.endAsked(ctx, st, asked, written)
		if last == nil {
			d.nativeRecovered(ctx, st)
			break
		}
		if !errors.Is(last, nft.ErrStale) && !errors.Is(last, nativestore.ErrOwnerWrote) {
			break
		}
	}
	if last != nil && !dry && r.loss != nil && r.loss.shown() {
		d.nativeFailed(ctx, st, last)
	}
	return asked.rows(r.tables, dry, last)
}

// A nativeAsked holds the results for the tables that an operator wants back, of all rounds.
type nativeAsked struct {
	wanted map[tableid.TableID]*native.Table
	left   []*native.Table                 // tables that cannot be put back
	back   map[tableid.TableID]api.Outcome // tables that were put back and proved
	less   map[tableid.TableID]error       // the parts and devices that they lack
	lacks  map[tableid.TableID]int         // in a dry run, the lost rules that the baseline lacks
}

// take notes the losses that a round of restoreNative found: they are not back, also if an
// earlier round had put them back. A round that could read nothing changes nothing.
func (a *nativeAsked) take(plan nativePlan) {
	if plan.seen.Ruleset == nil {
		return
	}
	a.left = plan.left
	for _, repair := range plan.repairs {
		delete(a.back, repair.Want.ID)
		a.wanted[repair.Want.ID] = repair.Want
	}
}

// rows returns the reply's row for each table. err is the last round's error: it is the reason
// of tables that are still lost, or gets a row of its own.
func (a nativeAsked) rows(tables map[tableid.TableID]*nativeTable, dry bool, err error) []api.NativeRestored {
	rows, unsaid := nativestore.Outcomes(nil, a.left, nil), err
	for i := range rows {
		for id, t := range tables {
			if t.out != nil && rows[i].Table == id.NFT() {
				rows[i].Detail, rows[i].Unread = errOwnerOnly.Error(), true
			}
		}
	}
	for id, want := range a.wanted {
		outcome, why := a.back[id], error(nil)
		switch t := tables[id]; {
		case slices.ContainsFunc(a.left, func(t *native.Table) bool { return t.ID == id }):
			continue
		case outcome == reload.Partial:
			why = cmp.Or(a.less[id], nativestore.ErrDevicesLeft)
		case dry, outcome != "": // a dry run puts nothing back
		case t == nil || !t.lost():
			outcome, why = reload.Skipped, errOwnerFaster
		default:
			outcome, why, unsaid = reload.Failed, err, nil
		}
		row := nativestore.Outcome(want, outcome, why)
		row.NotInBaseline = a.lacks[id]
		rows = append(rows, row)
	}
	if unsaid != nil {
		rows = append(rows, api.NativeRestored{Table: "native tables", Outcome: reload.Failed, Detail: unsaid.Error()})
	}
	sorting.Stable(rows, func(a, b api.NativeRestored) int { return cmp.Compare(a.Table, b.Table) })
	return rows
}

var (
	// errOwnerFaster: its owner has written a table while it was put back.
	errOwnerFaster = errors.New("its owner has written it meanwhile")
	// errOwnerOnly: a lost table was left out, so canaryd has none of its content.
	errOwnerOnly = errors.New("it was too large to keep (--max-rules); its owner has to write it again, or `canaryd dismiss` accepts it")
)

// endAsked ends the records of the tables that a restore wrote, as far as that is proved. An
// outcome is partial if parts or devices were left out.
func (d *Daemon) endAsked(ctx context.Context, st *state, asked nativeAsked, written []native.Repair) {
	for _, repair := range written {
		id, outcome := repair.Want.ID, reload.Proved
		if asked.less[id] = nativestore.PartsLeft(repair.Held()); st.native.loss.lacking || asked.less[id] != nil {
			outcome = reload.Partial
		}
		if t := st.native.tables[id]; t != nil && !t.lost() {
			if t.out != nil {
				outcome, asked.less[id] = reload.Partial, nativestore.ErrNotProved
			}
			asked.back[id] = outcome
			if d.endWaiting(ctx, st, id, outcome, true) {
				d.cfg.Metrics.ObserveNativeReplay(id.Family.NFT(), outcome)
			}
		}
	}
}

// leaveAsked leaves to the loop the part that a restore did not end. The loop tries a recorded
// loss again. It reads the tables that are still lost, which may be back by now, or have no
// record yet.
func (d *Daemon) leaveAsked(st *state, asked nativeAsked, dry bool) {
	r, now := &st.native, time.Now()
	if !dry && r.loss != nil && r.loss.shown() {
		r.loss.retry.At = now
	}
	for _, want := range slices.AppendSeq(slices.Clone(asked.left), maps.Values(asked.wanted)) {
		if t := r.tables[want.ID]; t != nil && t.lost() {
			t.touch(now, now, true)
		}
	}
	r.planReads(now)
}

// nativeByItself does the next steps of the loop before a request: tables that it puts back
// unasked need no request.
func (d *Daemon) nativeByItself(ctx context.Context, st *state) {
	r := &st.native
	r.asked = time.Time{}
	d.lookNative(ctx, st)
	if pace.Due(r.readAt, time.Now()) {
		d.readNative(ctx, st)
	}
	if r.loss != nil && st.heals() {
		r.loss.asked = true
		d.healNative(ctx, st)
	}
}

// recordAsked puts the tables of a restore into the flush record, unless they wait in a record
// of their own.
func (d *Daemon) recordAsked(ctx context.Context, st *state, repairs []native.Repair) {
	r := &st.native
	fresh := slices.DeleteFunc(slices.Clone(repairs), func(repair native.Repair) bool { return r.waiting[repair.Want.ID] != nil })
	if len(fresh) == 0 {
		return
	}
	if r.loss.record.ID == "" {
		r.loss.record = d.newNativeRecord(st, r.tables[fresh[0].Want.ID])
		r.loss.quiet() // a flush from now on has a record of its own
	}
	d.recordNative(ctx, st, fresh)
}

// endWaiting ends the record of a table that waited for its owner or an operator. asked: an
// operator requested a restore. It returns false if there is no such record.
func (d *Daemon) endWaiting(ctx context.Context, st *state, id tableid.TableID, outcome api.Outcome, asked bool) (waited bool) {
	w := st.native.waiting[id]
	if w == nil {
		return false
	}
	delete(st.native.waiting, id)
	if w.Outcome = outcome; outcome == reload.Proved || outcome == reload.Partial {
		w.Attempts++
		w.Older = st.native.older.takenFrom(id, st.native.tables[id].contentID)
	}
	back := outcome != api.Dismissed && outcome != api.OwnersDecision
	if back {
		d.cfg.Metrics.ObserveRecovery(flushes.EndAbsence(w, time.Now()), nil)
	}
	log := klog.FromContext(ctx)
	if st.journal.FoldsInto(*w) != nil {
		log = log.V(2)
	}
	switch outcome {
	case api.Dismissed:
		severity.Notices(log).Info(lossAccepted, "flush", w.ID, "tables", id.NFT())
	case api.OwnersDecision:
		severity.Notices(log).Info("The owner of a native table has removed it; canaryd accepts that", "flush", w.ID, "tables", id.NFT())
	default:
		flushes.LogBack(log, id.NFT(), *w, asked, w.Attempts)
	}
	d.keepRecord(ctx, st, *w, false, func() { d.write(ctx, *w, nil) })
	return true
}
