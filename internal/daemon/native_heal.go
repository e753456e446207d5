package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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

// healNative answers a loss of native tables: it waits until the flusher is done, puts the lost
// parts back and proves them. In observe mode and in a pause it only reports.
func (d *Daemon) healNative(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	r := &st.native
	if st.heals() && d.nativeLimited(ctx, st, true) {
		r.loss.quiet() // a later flush of iptables' tables is another one
		return
	}
	if !r.loss.logged {
		says, log := flushNoticed, severity.Warnings(st.nativeLog(ctx))
		if r.onlyDrill() {
			says, log = drillNoticed, severity.Notices(log)
		}
		r.loss.logNotice(log, says, r.losses(), st.nextStep())
	}
	if d.settleNative(ctx, st) || d.iptablesFirst(ctx, st) {
		return
	}
	last := nft.ErrStale
	for range nativestore.Tries {
		used := d.cpu()
		plan, err := d.planNative(ctx, st, r.mayBeLost, false)
		if err != nil {
			d.nativeFailed(ctx, st, err)
			return
		}
		if len(plan.repairs) == 0 {
			r.finishRead(time.Now(), plan.seen, false)
			if r.loss.retry.At = r.reportDue(); r.loss.retry.At.IsZero() {
				d.nativeRecovered(ctx, st)
			}
			return
		}
		d.endBack(ctx, st, plan.repairs)
		d.recordNative(ctx, st, plan.repairs)
		if !st.heals() {
			d.holdNative(ctx, st, plan.seen.Genid)
			return
		}
		again := r.loss.lostAgain(plan.repairs)
		done, err := d.replayNative(ctx, st, plan)
		if (len(done) > 0 || !errors.Is(err, nft.ErrStale)) && r.loss.record.Drill == "" {
			d.spend(&r.contention, used)
		}
		switch {
		case err == nil:
			d.nativeRecovered(ctx, st)
			return
		case errors.Is(err, nft.ErrStale):
			last = nft.ErrStale
		case errors.Is(err, nativestore.ErrOwnerWrote): // the owner's write is learned, or more is lost
			last = nativestore.ErrOwnerWrote
			if d.nativeLimited(ctx, st, again) {
				return
			}
			if d.settleNative(ctx, st) {
				return
			}
		default:
			d.nativeFailed(ctx, st, err)
			return
		}
	}
	d.nativeFailed(ctx, st, fmt.Errorf("%d times: %w", nativestore.Tries, last))
}

// losses returns the tables that are lost and will be put back, for the log.
func (r *nativeRealm) losses() string {
	var list []string
	for _, id := range r.ids() {
		if t := r.tables[id]; t.lost() && t.finding.Remedy != native.NoRemedy {
			list = append(list, id.NFT()+" "+string(t.finding.Verdict))
		}
	}
	return strings.Join(list, ", ")
}

// nativeLimited reports whether healNative has to stop, because replays are limited; see limited.
func (d *Daemon) nativeLimited(ctx context.Context, st *state, undone bool) bool {
	return st.native.contention.limited(ctx, &st.native.loss.retry, undone, func() api.Flush { return d.accused(st) })
}

// accused returns the open record with the processes that took its tables, for the log. Its own
// culprits are known when the flusher is done.
func (d *Daemon) accused(st *state) api.Flush {
	record := st.native.loss.record
	if st.native.loss.shown() {
		return record
	}
	record.Culprits = slices.Clone(record.Culprits)
	for _, t := range st.native.tables {
		if t.lost() {
			flushes.Accuse(&record, d.takersOf(t))
		}
	}
	flushes.SettleCulprit(&record)
	return record
}

// lostAgain reports whether a repair is of a table that was already written for this loss, and
// is not proved. healNative calls it before a try. If the limit is reached, it then blames a
// process that keeps undoing replays.
func (l *nativeLoss) lostAgain(repairs []native.Repair) bool {
	return slices.ContainsFunc(repairs, func(r native.Repair) bool { return l.unswept[r.Want.ID] })
}

// replayNative writes a plan, and proves the repairs that the kernel took, which it returns.
// The error is nil if these are all repairs, and proved. Else healNative or restoreNative plans
// and tries again.
func (d *Daemon) replayNative(ctx context.Context, st *state, plan nativePlan) (done []native.Repair, err error) {
	done, err = d.writeNative(ctx, st, plan)
	if len(done) > 0 {
		err = errors.Join(err, d.proveNative(ctx, st, plan.seen.Genid, done))
	}
	return done, err
}

// iptablesFirst looks whether the flusher has taken iptables' rules meanwhile, and reports
// whether that is news. healNative then returns, and the loop puts these back first, or
// together with native tables: a replay of native tables may take seconds.
func (d *Daemon) iptablesFirst(ctx context.Context, st *state) bool {
	if st.loss != nil {
		return false // it is known, and its next try may be far
	}
	st.looking.hint(time.Now())
	d.look(ctx, st)
	return st.loss != nil
}

// A nativePlan is the planned write to native tables, with the read that it depends on.
type nativePlan struct {
	seen      nativeSight
	repairs   []native.Repair
	witnesses map[tableid.Family]string // witnesses that are gone
	left      []*native.Table           // tables that an operator wants back, and that cannot be put back
}

// planNative reads the wanted tables that may be lost; wanted gets nil for an unknown table. It
// plans to put lost tables back, for an operator (asked) also those that canaryd does not put
// back unasked. It learns a table that its owner changed.
func (d *Daemon) planNative(ctx context.Context, st *state, wanted func(*nativeTable) bool, asked bool) (plan nativePlan, err error) {
	r := &st.native
	if plan.seen, err = d.hearAndSight(ctx, st, wanted); err != nil {
		return nativePlan{}, err
	}
	for _, id := range r.ids() {
		f, judged := plan.seen.findings[id]
		t, remedy := r.tables[id], f.Remedy
		if !judged {
			if asked && t.out != nil && t.lost() { // parts of it
				plan.left = append(plan.left, t.want)
			}
			continue
		}
		switch {
		case t.out != nil:
			remedy = native.NoRemedy
		case asked:
			remedy = nativestore.AskedRemedy(f, plan.seen.Tables[id])
		case t.old:
			remedy = native.NoRemedy
		}
		if remedy != native.NoRemedy || nativestore.Lost(f.Verdict) {
			t.finding = f
		}
		switch {
		case remedy != native.NoRemedy:
			if f.Verdict != native.Replaced || t.unheard { // else its file is older than the owner's removals
				t.noteRemoved(plan.seen.Tables[id], d.deedsUpTo(id, t, plan.seen.Genid))
			}
			plan.add(t, remedy)
		case !nativestore.Lost(f.Verdict):
			d.adoptNative(ctx, st, id, plan.seen, f)
		case asked:
			plan.left = append(plan.left, t.want)
		case !d.awaitsSibling(r, id, t):
			t.rest(r.all, plan.seen.Genid)
			d.reportNative(ctx, st, id, plan.seen.Tables[id])
		}
	}
	sorting.Stable(plan.repairs, func(a, b native.Repair) int { return cmp.Compare(a.Want.Handle, b.Want.Handle) })
	r.begun = r.begun || plan.seen.all
	if len(plan.repairs) > 0 {
		plan.witnesses, err = d.missingWitnesses(ctx, st)
	}
	return plan, err
}

// add plans the repair of a table.
func (p *nativePlan) add(t *nativeTable, remedy native.Remedy) {
	p.repairs = append(p.repairs, native.NewRepair(remedy, t.want.Without(t.removed), p.seen.Tables[t.want.ID], time.Since(t.leftAt)))
}

// mayBeLost reports whether planNative has to read a table for a verdict; nil is a table that
// canaryd does not guard yet.
func (r *nativeRealm) mayBeLost(t *nativeTable) bool {
	return r.all || t == nil && r.fresh || t != nil && (!t.dirty.IsZero() || t.lost())
}

// hearAndSight hears the commits until now, and reads the wanted tables. The flusher's deeds
// while canaryd waited belong to this loss, other tables too.
func (d *Daemon) hearAndSight(ctx context.Context, st *state, wanted func(*nativeTable) bool) (nativeSight, error) {
	if _, err := d.hearNow(ctx, st); err != nil {
		return nativeSight{}, err
	}
	return d.sightNative(ctx, st, d.cfg.Native.Kernel.Capture, func(id tableid.TableID) bool { return wanted(st.native.tables[id]) })
}

// writeNative writes all repairs in one transaction, with the witnesses that are gone. If the
// kernel refuses that as a whole, each table is written by itself: one bad table must not cost
// the others. It returns the repairs that were written, after an error too.
func (d *Daemon) writeNative(ctx context.Context, st *state, plan nativePlan) (done []native.Repair, err error) {
	left, err := d.cfg.Native.Kernel.Write(plan.seen.Genid, plan.repairs, plan.witnesses)
	var refused *nft.RefusedError
	switch {
	case err == nil:
		done = plan.repairs
	case errors.As(err, &refused) && len(plan.repairs)+len(plan.witnesses) > 1:
		clear(plan.witnesses)
		done, left, err = d.writeOneByOne(st, plan, err)
	}
	if len(done) > 0 {
		d.wroteNative(st, plan, done, time.Now())
		d.noteLeft(ctx, st, left)
	}
	return done, err
}

// writeOneByOne writes each table in a transaction of its own, after the kernel refused all of
// them together (first). It returns the written repairs, the devices that were left out of
// these, and why the other repairs were not written. Missing witnesses are planted later.
func (d *Daemon) writeOneByOne(st *state, plan nativePlan, first error) (done []native.Repair, left []string, err error) {
	st.native.plantAt = time.Now()
	genid := plan.seen.Genid
	var failed []error
	for _, repair := range plan.repairs {
		one := []native.Repair{repair}
		lacking, err := d.cfg.Native.Kernel.Write(genid, one, nil)
		if errors.Is(err, nft.ErrStale) {
			return done, left, err
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("table %s: %w", repair.Want.ID.NFT(), err))
			continue
		}
		done, left = append(done, one[0]), append(left, lacking...)
		now, err := d.cfg.Native.Kernel.Genid()
		if err != nil {
			return done, left, err
		}
		if genid = nft.Following(genid); now != genid { // more than our own commit
			return done, left, nft.ErrStale
		}
	}
	if len(failed) == len(plan.repairs) {
		failed = append(failed, first)
	}
	return done, left, errors.Join(failed...)
}

// wroteNative notes the time of a plan's write for the record, the tables that it wrote (done), and
// the witnesses that it planted.
func (d *Daemon) wroteNative(st *state, plan nativePlan, done []native.Repair, at time.Time) {
	st.native.loss.written = at
	for _, repair := range done {
		t := st.native.tables[repair.Want.ID]
		t.replayed, t.wroteAt, t.unheard = true, nft.Following(plan.seen.Genid), false
	}
	st.native.planted(plan.witnesses)
}

// noteLeft notes the network devices (left) that a replay left out, because the node lacks
// them. The log names them, and the loss ends as partial.
func (d *Daemon) noteLeft(ctx context.Context, st *state, left []string) {
	l := st.native.loss
	if l.lacking = l.lacking || len(left) > 0; len(left) > 0 {
		log := klog.FromContext(ctx)
		if l.record.ID != "" { // an operator may have asked for tables of other records
			log = log.WithValues("flush", l.record.ID)
		}
		severity.Warnings(log).Info("Network devices that the node lacks were left out of native tables", "devices", left)
	}
}

// proveNative reads the repaired tables again. Their content ought to be in force from now on:
// the restored parts, with their owner's newer changes. If another process wrote to them after
// the write, which followed that genid, the error is ErrOwnerWrote.
func (d *Daemon) proveNative(ctx context.Context, st *state, read uint32, repairs []native.Repair) error {
	l, start := st.native.loss, time.Now()
	byID := map[tableid.TableID]native.Repair{}
	for _, repair := range repairs {
		byID[repair.Want.ID] = repair
		l.sweepLater(repair.Want.ID)
	}
	proof, err := d.cfg.Native.Kernel.Capture(func(t nft.Table) bool {
		_, asked := byID[t.Family.Table(t.Name)]
		return asked
	})
	if err != nil {
		l.unproved = true
		return err
	}
	st.memory.ScheduleFree(time.Now())
	d.noteDrift(ctx, proof)
	d.takeNativeLeftOut(ctx, st, proof, nil, time.Since(start))
	seen := nativeSight{Ruleset: proof}
	var missing []tableid.TableID
	var back []*native.Table
	untouched := proof.Genid == nft.Following(read) // by a process other than canaryd
	for id, repair := range byID {
		if _, left := proof.LeftOut[id]; left {
			d.leaveUnproved(ctx, st, id)
			continue
		}
		if repair.Repaired(proof.Tables[id], l.lacking) {
			now := seen.learned(id)
			now.own = true
			d.adopt(ctx, st, now)
			d.holdRefused(ctx, st, repair)
			if !st.native.tables[id].drill {
				back = append(back, repair.Want)
			}
			delete(l.unswept, id)
			continue
		}
		missing = append(missing, id)
	}
	d.sweepNative(back, l.intact)
	// Commits since the proof are heard after it is learned: so the state before a flush is, too.
	if err := d.hearNative(ctx, st, proof.Genid); err != nil {
		l.unproved = true
		return err
	}
	var names []string
	for _, id := range missing {
		names = append(names, id.NFT())
		t := st.native.tables[id]
		untouched = untouched || !t.missed && !slices.ContainsFunc(t.deeds, func(d nativeDeed) bool { return nft.Newer(d.Genid, read) })
	}
	if len(missing) > 0 && !untouched {
		l.replayed = true // the kernel took the write, and the next read judges the changes since
		return nativestore.ErrOwnerWrote
	}
	if len(missing) > 0 {
		l.unproved = true
		slices.Sort(names)
		return fmt.Errorf("%s: %w", strings.Join(names, ", "), nativestore.ErrNotInForce)
	}
	l.replayed = true
	return nil
}

// sweepLater notes a table that was written and is not proved yet. It may be in force, or its
// owner may have written it meanwhile. If no proof follows, endNative may sweep its flows.
func (l *nativeLoss) sweepLater(id tableid.TableID) {
	if l.unswept == nil {
		l.unswept = map[tableid.TableID]bool{}
	}
	l.unswept[id] = true
}

// nativeFailed plans the next try after err, and says in the record, the status and the log why
// the rules are still missing.
func (d *Daemon) nativeFailed(ctx context.Context, st *state, err error) {
	l := st.native.loss
	if l.fail(err); errors.Is(err, nft.ErrStale) || errors.Is(err, nft.ErrInterrupted) {
		l.retry.In(pace.FirstTry, time.Now())
	}
	if st.heals() || l.asked { // else a read failed, and no replay
		l.record.Attempts = max(l.record.Attempts, l.attempts)
		for id := range l.hit {
			if t := st.native.tables[id]; t != nil && t.lost() {
				d.cfg.Metrics.ObserveNativeReplay(id.Family.NFT(), reload.Failed)
			}
		}
	}
	d.keepOpen(ctx, st, l.openRecord)
	l.logRetry(st.nativeLog(ctx), err, l.shown(), strings.Join(l.record.NativeNames(), ", "))
}

// holdNative leaves a loss as it is: until the pause ends or, in observe mode, until the owner has
// written its table again.
func (d *Daemon) holdNative(ctx context.Context, st *state, genid uint32) {
	r, l := &st.native, st.native.loss
	for _, t := range r.tables {
		if t.lost() {
			t.rest(r.all, genid)
		}
	}
	why := api.WaitingPaused
	l.retry.At = st.pause.until
	if st.mode == api.Observe {
		why, l.retry.At = api.WaitingObserve, time.Time{}
	}
	d.keepHeld(ctx, st, l.openRecord, why)
	d.witnessesDue(st)
}
