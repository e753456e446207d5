package daemon

import (
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
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// setQuarantine makes list or held the quarantined parts of a table. New ones belong to the record
// of the loss that hit the table. A record ends with its last part.
func (d *Daemon) setQuarantine(ctx context.Context, st *state, id tableid.TableID, list []reload.QuarantinedRule, held []native.Held, by quarantine.Cause) int {
	if len(list)+len(held)+st.quarantine.Count(id) == 0 {
		return 0
	}
	flush, r := "", &st.native
	switch {
	case st.loss != nil && st.loss.hit[id] != "":
		flush = st.loss.record.ID
	case r.waiting[id] != nil:
		flush = r.waiting[id].ID
	case r.loss != nil && r.loss.hit[id] && !r.loss.lacking: // missing devices leave the record partial
		flush = r.loss.record.ID
	}
	fresh, ended := st.quarantine.Set(ctx, id, list, held, by, flush)
	for _, flush := range ended {
		switch by {
		case quarantine.GivenUp:
			d.endPartial(ctx, st, flush, reload.Partial, "parts of "+id.NFT()+" were given up: "+takenWhileLeftOut)
		case quarantine.Operator:
			d.endPartial(ctx, st, flush, api.Dismissed, "")
		default:
			d.endPartial(ctx, st, flush, reload.Proved, "")
		}
	}
	st.disk.marksChanged(time.Now())
	r.disk.changed(time.Now())
	return fresh
}

// holdOn updates the quarantine after an owner has changed its native table. A table that the owner
// made again, or a chain that it wrote again, counts as the owner's decision.
func (d *Daemon) holdOn(ctx context.Context, st *state, t *nativeTable, now nativeLearned) {
	var still []native.Held
	if held := st.quarantine.Held(now.id); len(held) > 0 && t.want.Handle == now.Table.Handle {
		_, _, still = now.Table.With(held)
	}
	d.setQuarantine(ctx, st, now.id, nil, still, quarantine.Owner)
}

// holdRefused puts the parts that a proved repair left out into quarantine, next to the earlier
// ones. If there are any, the loss ends as partial.
func (d *Daemon) holdRefused(ctx context.Context, st *state, repair native.Repair) {
	id := repair.Want.ID
	_, _, still := st.native.tables[id].want.With(st.quarantine.Held(id))
	if d.setQuarantine(ctx, st, id, nil, slices.Concat(still, repair.Held()), quarantine.Replay) > 0 && st.native.loss != nil {
		st.native.loss.partial = true
	}
}

// logWeakened logs the rules that were written without a match that only counts.
func (d *Daemon) logWeakened(ctx context.Context, result reload.Result) {
	for id, tr := range flushes.TablesOf(result) {
		for _, h := range tr.Weakened[:min(flushes.NamesKept, len(tr.Weakened))] {
			severity.Warnings(klog.FromContext(ctx)).Info("A rule was put back without its nfacct match, which only counts", "family", id.Family, "table", id.Name,
				"chain", h.Chain, "rule", h.Rule.Label(), "reason", h.Reason)
		}
	}
}

// nextReadmission returns the table whose parts are tried next, and when. A kind of table with an
// open loss waits for its end.
func nextReadmission(st *state) (tableid.TableID, time.Time) {
	return st.quarantine.Next(func(native bool) bool { return native && mayWriteNative(st) || !native && st.mayWrite() })
}

func readmitAt(st *state) time.Time {
	_, at := nextReadmission(st)
	return at
}

// readmit puts quarantined parts of one table back as far as that is possible by now. The loop
// calls it after pauses that grow, when a missing chain is back, and after a dismissal.
func (d *Daemon) readmit(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	id, _ := nextReadmission(st)
	st.quarantine.Tried(id, time.Now())
	try := d.readmitRules
	if len(st.quarantine.Held(id)) > 0 {
		try = d.readmitTable
	}
	if err := try(ctx, st, id); err != nil {
		klog.FromContext(ctx).V(1).Info("Parts in quarantine could not be put back yet", "table", id.String(), "reason", err)
	}
}

// readmitRules is readmit for a table of iptables, and for the others of its family.
func (d *Daemon) readmitRules(ctx context.Context, st *state, id tableid.TableID) error {
	job := d.job(st, id.Family)
	job.Interrupted = func() bool { return d.lostMore(ctx, st) }
	result, err := d.replayer(ctx, st).Readmit(ctx, job)
	for f, fr := range result {
		d.applyResult(ctx, st, f, fr)
		d.countRefusal(f, fr.Err)
		if !fr.Outcome.Done() && !fr.DoneExceptQuarantined() {
			err = errors.Join(err, fr.Err)
		}
	}
	d.countLocked(st, result, err)
	st.looking.plan(time.Now())
	return err
}

// readmitTable is readmit for a native table. A part that the kernel still refuses costs no commit.
// After an error, or a write without proof, a read judges the table, or the next try follows.
func (d *Daemon) readmitTable(ctx context.Context, st *state, id tableid.TableID) (err error) {
	r := &st.native
	switch t := r.tables[id]; {
	case t == nil:
		d.setQuarantine(ctx, st, id, nil, nil, quarantine.Owner)
		return nil
	case t.out != nil:
		st.quarantine.Plan(id, time.Time{})
		return nil
	case t.lost() || t.old:
		return nil
	}
	defer func() {
		if errors.Is(err, nft.ErrStale) || errors.Is(err, nft.ErrInterrupted) {
			st.quarantine.Plan(id, time.Now().Add(pace.FirstTry))
		}
		r.planReads(time.Now())
	}()
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
	repair, still := native.Admission(seen.Tables[id], st.quarantine.Held(id))
	if d.setQuarantine(ctx, st, id, nil, still, quarantine.Owner); len(still) == 0 {
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
	now := nativeSight{Ruleset: proof}.learned(id)
	now.own = true
	d.adopt(ctx, st, now)
	d.setQuarantine(ctx, st, id, nil, left, quarantine.Replay)
	return nil
}

// supplement returns the section that was read of a table, with its quarantined rules added:
// learn must not take them for removed. Rules that their owner has put back leave the
// quarantine.
func (d *Daemon) supplement(ctx context.Context, st *state, id rules.TableID, seen rules.Section) rules.Section {
	before := st.quarantine.Count(id)
	if before == 0 {
		return seen
	}
	full, next := st.quarantine.Rules().Supplement(id.Family, id.Name, st.want()[id], seen, d.protection(st).Piecewise)
	if len(next[id]) != before {
		d.setQuarantine(ctx, st, id, next[id], nil, quarantine.Owner)
	}
	return full
}

// releaseRemoved ends the quarantine of rules whose owner has removed the chain that they lead
// to, or has removed or emptied their own chain. It returns the learned generation without
// those rules. The owner could not delete them, because the table lacks them. A rule that leads
// to a chain of another owner stays in quarantine until that chain is back: its own owner has
// decided nothing.
func (d *Daemon) releaseRemoved(ctx context.Context, st *state, id rules.TableID, before rules.Section, next reload.Learned) reload.Learned {
	list := st.quarantine.Rules()[id]
	if len(list) == 0 {
		return next
	}
	removed := make(map[string]rules.Chain, len(before.Chains))
	for _, c := range before.Chains {
		removed[c.Name] = c
	}
	emptied := map[string]bool{}
	for _, c := range next.Generation[id].Chains {
		emptied[c.Name] = len(c.Rules) == 0 && len(removed[c.Name].Rules) > 0
		delete(removed, c.Name)
	}
	var gone, left []reload.QuarantinedRule
	for _, h := range list {
		_, leads := removed[h.Rule.Target]
		leads = leads && !before.IsLedTo(h.Rule.Target)
		if _, in := removed[h.Chain]; in || leads || emptied[h.Chain] {
			gone = append(gone, h)
		} else {
			left = append(left, h)
		}
	}
	if len(gone) == 0 {
		return next
	}
	d.setQuarantine(ctx, st, id, left, nil, quarantine.Owner)
	return next.WithoutQuarantined(reload.Quarantine{id: gone})
}

// dismissQuarantined accepts the loss of parts that cannot be put back, and returns how many these
// are. Parts that waited for them are put back as soon as canaryd may write, and it returns how
// many. Declared rules stay declared, and are tried again.
func (d *Daemon) dismissQuarantined(ctx context.Context, st *state) (lost, waiting int) {
	now := time.Now()
	dismissed, left := st.quarantine.Rules().Split()
	for _, id := range st.quarantine.Tables() {
		before := st.quarantine.Count(id)
		held := slices.DeleteFunc(slices.Clone(st.quarantine.Held(id)), func(h native.Held) bool { return !h.Waits })
		d.setQuarantine(ctx, st, id, left[id], held, quarantine.Operator)
		still := st.quarantine.Count(id)
		if lost, waiting = lost+before-still, waiting+still; still < before {
			st.quarantine.Plan(id, now)
		}
		if len(dismissed[id]) > 0 {
			st.families[id.Family].examined.plan(now)
		}
	}
	if len(dismissed) > 0 {
		st.relearn(st.generation.learned.WithoutQuarantined(dismissed), now, slices.Collect(maps.Values(st.families))...)
	}
	return lost, waiting
}
