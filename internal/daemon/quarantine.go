package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// setQuarantine makes list the quarantined rules of one table of iptables; seen is the section of
// the last read. If the open loss hit the table, new ones belong to its record.
func (d *Daemon) setQuarantine(st *state, id rules.TableID, list []reload.QuarantinedRule, seen rules.Section, by quarantine.Cause) {
	flush := ""
	if st.loss != nil && st.loss.hit[id] != "" {
		flush = st.loss.record.ID
	}
	standing := sync.OnceValue(func() func(reload.QuarantinedRule) bool { return reload.StandsIn(seen) })
	st.quarantine.SetRules(id, list, by, flush, func(h reload.QuarantinedRule) bool { return standing()(h) })
	st.disk.marksChanged(time.Now())
}

// hold makes held the quarantined parts of a native table, and returns how many are new. now is the
// table by the last read; nil: it is gone. New parts belong to the record of the loss, or to that
// with which the table waited.
func (d *Daemon) hold(st *state, id tableid.TableID, held []native.Held, now *native.Table, by quarantine.Cause) (fresh int) {
	r, flush := &st.native, ""
	if len(held)+st.quarantine.Count(id) == 0 {
		return 0
	}
	if w := r.waiting[id]; w != nil {
		flush = w.ID
	} else if r.loss != nil {
		flush = r.loss.record.ID
	}
	standing := sync.OnceValue(func() func(native.Held) bool { return now.Standing() })
	r.disk.changed(time.Now())
	return st.quarantine.SetHeld(id, held, by, flush, func(h native.Held) bool { return now != nil && standing()(h) })
}

// holdOn updates the quarantine after an owner has changed its native table. A table that the owner
// made again, or a chain that it wrote again, counts as the owner's decision.
func (d *Daemon) holdOn(st *state, t *nativeTable, now nativeLearned) {
	held := st.quarantine.Held(now.id)
	if len(held) == 0 {
		return
	}
	var still []native.Held
	if t.want.Handle == now.Table.Handle {
		_, _, still = now.Table.With(held)
	}
	d.hold(st, now.id, still, now.Table, quarantine.Owner)
}

// holdRefused puts the parts that a proved repair left out into quarantine, next to the earlier
// ones. If there are any, the loss ends as partial.
func (d *Daemon) holdRefused(st *state, repair native.Repair) {
	id := repair.Want.ID
	t := st.native.tables[id]
	_, _, still := t.want.With(st.quarantine.Held(id))
	if d.hold(st, id, slices.Concat(still, repair.Held()), t.want, quarantine.Replay) > 0 && st.native.loss != nil {
		st.native.loss.partial = true
	}
}

// takeQuarantine logs the changes of the quarantine, and ends the records of flushes that lack no
// part any more. The loop calls it after each step.
func (d *Daemon) takeQuarantine(ctx context.Context, st *state) {
	for _, e := range st.quarantine.Take(ctx) {
		if e.Outcome == reload.Partial {
			d.explainPartial(ctx, st, e.Flush, fmt.Sprintf("parts of %s were given up: %s", e.Table.NFT(), takenWhileLeftOut))
		} else {
			d.completeRecord(ctx, st, e.Flush, e.Outcome)
		}
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

// readmitAt returns when quarantined parts are tried next. Those of a kind of table with an open loss
// wait for its end.
func readmitAt(st *state) time.Time { return st.quarantine.At(st.mayWrite(), mayWriteNative(st)) }

// readmit puts quarantined parts back as far as that is possible by now. The loop calls it after
// pauses that grow, when a missing chain is back, and after a dismissal.
func (d *Daemon) readmit(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	var families []rules.Family
	for _, id := range st.quarantine.Due(st.mayWrite(), mayWriteNative(st), time.Now()) {
		var err error
		switch {
		case len(st.quarantine.Held(id)) > 0:
			err = d.readmitTable(ctx, st, id)
		case !slices.Contains(families, id.Family):
			families = append(families, id.Family)
			err = d.readmitRules(ctx, st, id.Family)
		}
		if err != nil {
			klog.FromContext(ctx).V(1).Info("Parts in quarantine could not be put back yet", "table", id.String(), "reason", err)
		}
	}
}

// readmitRules is readmit for iptables' tables of one family.
func (d *Daemon) readmitRules(ctx context.Context, st *state, family rules.Family) error {
	job := d.job(st, family)
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
func (d *Daemon) readmitTable(ctx context.Context, st *state, id tableid.TableID) error {
	r := &st.native
	switch t := r.tables[id]; {
	case t == nil:
		d.hold(st, id, nil, nil, quarantine.Owner)
		return nil
	case t.out != nil:
		st.quarantine.Suspend(id)
		return nil
	case t.lost() || t.old:
		return nil
	}
	defer func() { r.planReads(time.Now()) }()
	err := d.readmitHeld(ctx, st, id)
	if errors.Is(err, nft.ErrStale) || errors.Is(err, nft.ErrInterrupted) {
		st.quarantine.Again(id, time.Now())
	}
	return err
}

// readmitHeld reads a native table, and writes and proves its quarantined parts.
func (d *Daemon) readmitHeld(ctx context.Context, st *state, id tableid.TableID) error {
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
	repair, still := native.Admission(seen.Tables[id], st.quarantine.Held(id))
	if d.hold(st, id, still, seen.Tables[id], quarantine.Owner); len(still) == 0 {
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
	d.adopt(ctx, st, nativeSight{Ruleset: proof}.written(id))
	d.hold(st, id, left, proof.Tables[id], quarantine.Replay)
	return nil
}

// supplement returns the section that was read of a table, with its quarantined rules added:
// learn must not take them for removed. Rules that their owner has put back leave the
// quarantine.
func (d *Daemon) supplement(st *state, id rules.TableID, seen rules.Section) rules.Section {
	before := st.quarantine.Count(id)
	if before == 0 {
		return seen
	}
	full, next := st.quarantine.Rules().Supplement(id.Family, id.Name, st.want()[id], seen, d.protection(st).Piecewise)
	if len(next[id]) != before {
		d.setQuarantine(st, id, next[id], seen, quarantine.Owner)
	}
	return full
}

// releaseRemoved ends the quarantine of rules whose owner has removed the chain that they lead
// to, or has removed or emptied their own chain. It returns the learned generation without
// those rules. The owner could not delete them, because the table lacks them. A rule that leads
// to a chain of another owner stays in quarantine until that chain is back: its own owner has
// decided nothing.
func (d *Daemon) releaseRemoved(st *state, id rules.TableID, before rules.Section, next reload.Learned) reload.Learned {
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
	d.setQuarantine(st, id, left, st.table(id).seen, quarantine.Owner)
	return next.WithoutQuarantined(reload.Quarantine{id: gone})
}

// dismissQuarantined accepts the loss of parts that cannot be put back, and returns how many these
// are. Parts that waited for them are put back as soon as canaryd may write, and it returns how
// many. Declared rules stay declared, and are tried again.
func (d *Daemon) dismissQuarantined(st *state) (lost, waiting int) {
	now := time.Now()
	lost, waiting, dismissed := st.quarantine.Dismiss(now)
	if len(dismissed) > 0 {
		for id := range dismissed {
			st.families[id.Family].examined.plan(now)
		}
		st.relearn(st.generation.learned.WithoutQuarantined(dismissed), now, slices.Collect(maps.Values(st.families))...)
	}
	st.disk.marksChanged(now)
	st.native.disk.changed(now)
	return lost, waiting
}
