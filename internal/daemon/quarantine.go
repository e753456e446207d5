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
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ownersPause is how long an owner that writes rules one by one may pause between two of them.
const ownersPause = 2 * time.Second

// quarantine has the rules that cannot be put back yet.
type quarantine struct {
	rules reload.Quarantine
	retry pace.Retry // when they are tried again
	// stood are the chains that quarantined rules lacked when they were quarantined, and that
	// the last examination saw.
	stood map[rules.Family]map[iptables.Place]bool
}

// setQuarantine makes list the quarantined rules of one table; seen is the section of the last
// read. If the list has grown, readmit soon tries its rules.
func (d *Daemon) setQuarantine(st *state, id rules.TableID, list []reload.QuarantinedRule, seen rules.Section) {
	before := st.quarantine.rules[id]
	st.releaseMissing(id, list, seen)
	st.quarantine.rules = st.quarantine.rules.With(id, list)
	d.cfg.Metrics.SetQuarantined(id.Family, id.Name, len(list))
	for _, h := range list {
		delete(st.quarantine.stood[id.Family], iptables.Place{Table: id.Name, Chain: h.MissingChain})
	}
	switch {
	case st.quarantine.rules.Count() == 0:
		st.quarantine.retry = pace.Retry{}
	case len(list) > len(before):
		st.quarantine.retry.In(pace.FirstTry, time.Now())
	}
}

// The log uses these words for all tables when a part is put into quarantine, or leaves it.
const (
	partHeld     = "A part of a table is in quarantine: it could not be put back"
	rulesWait    = "Rules of a chain wait, because missing rules decide which packets reach them"
	waitNext     = "they are put back in their places when those are back"
	partsBack    = "Parts of a table were put back from quarantine"
	partAccepted = "An operator has accepted that a part of a table in quarantine is lost"
)

// partOf returns the log's name of a rule as a part of a table.
func partOf(h reload.QuarantinedRule) string { return "rule " + h.Chain + " " + h.Rule.Label() }

// logQuarantined logs the quarantined rules, and the rules that were written without a match
// that only counts.
func (d *Daemon) logQuarantined(ctx context.Context, result reload.Result) {
	log := klog.FromContext(ctx)
	for id, tr := range flushes.TablesOf(result) {
		missing, waiting := reload.Quarantine{id: tr.Quarantined}.Split()
		for _, h := range missing[id][:min(flushes.NamesKept, len(missing[id]))] {
			next := "it is tried again"
			if _, opaque := h.Rule.Opaque(); opaque && !h.Refused {
				next = "its owner has to put it back"
			}
			severity.Errors(log).Info(partHeld, "table", id.String(), "part", partOf(h), "reason", h.Reason, "next", next)
		}
		var list []api.Quarantined
		for _, h := range waiting[id] {
			list = append(list, api.QuarantinedOf(id, h))
		}
		chains := api.WaitingChains(list)
		for _, w := range chains[:min(flushes.NamesKept, len(chains))] {
			severity.Errors(log).Info(rulesWait, "table", id.String(), "chain", w.Chain, "rules", w.Rules, "reason", w.Reason, "next", waitNext)
		}
		for _, h := range tr.Weakened[:min(flushes.NamesKept, len(tr.Weakened))] {
			severity.Warnings(log).Info("A rule was put back without its nfacct match, which only counts", "family", id.Family, "table", id.Name,
				"chain", h.Chain, "rule", h.Rule.Label(), "reason", h.Reason)
		}
	}
}

// readmit puts quarantined rules back as far as that is possible by now. The loop calls it
// after pauses that grow, when a missing chain is back, and after a dismissal.
func (d *Daemon) readmit(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	before := st.quarantine.rules
	var families []rules.Family
	for _, f := range d.cfg.Kernel.Families() {
		if len(tableid.Of(st.quarantine.rules, f)) > 0 {
			families = append(families, f)
		}
	}
	st.quarantine.retry.Failed(nil, time.Now())
	job := d.job(st, families...)
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
	log := klog.FromContext(ctx)
	if err != nil {
		log.V(1).Info("Parts in quarantine could not be put back yet", "reason", err)
	}
	for id, list := range before {
		if left := len(st.quarantine.rules[id]); left < len(list) {
			severity.Notices(log).Info(partsBack, "table", id.String(), "parts", len(list)-left, "left", left)
		}
	}
}

// readmitReturned plans a try of quarantined rules when a chain that they lacked is back. A
// chain that the last examination already saw is no reason.
func (st *state) readmitReturned(snapshot iptables.Snapshot) {
	now, before := st.quarantine.rules.Standing(snapshot), st.quarantine.stood[snapshot.Family]
	for place := range now {
		if !before[place] {
			st.quarantine.retry.At = pace.Earliest(st.quarantine.retry.At, time.Now())
		}
	}
	st.quarantine.stood[snapshot.Family] = now
}

// supplement returns the section that was read of a table, with its quarantined rules added:
// learn must not take them for removed. Rules that their owner has put back leave the
// quarantine.
func (d *Daemon) supplement(st *state, id rules.TableID, seen rules.Section) rules.Section {
	before := st.quarantine.rules[id]
	if len(before) == 0 {
		return seen
	}
	full, next := st.quarantine.rules.Supplement(id.Family, id.Name, st.want()[id], seen, d.protection(st).Piecewise)
	if len(next[id]) != len(before) {
		d.setQuarantine(st, id, next[id], seen)
		// An owner that puts its rules back one by one may be about to write the rules that
		// wait.
		if len(next[id]) > 0 {
			st.quarantine.retry.In(ownersPause, time.Now())
		}
	}
	return full
}

// releaseRemoved ends the quarantine of rules whose owner has removed the chain that they lead
// to, or has removed or emptied their own chain. It returns the learned generation without
// those rules. The owner could not delete them, because the table lacks them. A rule that leads
// to a chain of another owner stays in quarantine until that chain is back: its own owner has
// decided nothing.
func (d *Daemon) releaseRemoved(st *state, id rules.TableID, before rules.Section, next reload.Learned) reload.Learned {
	list := st.quarantine.rules[id]
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
	d.setQuarantine(st, id, left, st.table(id).seen)
	return next.WithoutQuarantined(reload.Quarantine{id: gone})
}

// quarantines reports whether one of these tables has a rule in quarantine. Then a loss ends as
// partial.
func (st *state) quarantines(tables flushes.Verdicts) bool {
	for id := range tables {
		if len(st.quarantine.rules[id]) > 0 {
			return true
		}
	}
	return false
}

// dismissQuarantined accepts the loss of rules that cannot be put back, and returns how many
// these are. Rules that waited for them are put back as soon as canaryd may write, and it
// returns how many these are. Declared rules stay declared, and are tried again.
func (d *Daemon) dismissQuarantined(ctx context.Context, st *state) (lost, waiting int) {
	now := time.Now()
	dismissed, left := st.quarantine.rules.Split()
	if len(dismissed) == 0 {
		return 0, left.Count()
	}
	for id, list := range dismissed {
		d.setQuarantine(st, id, left[id], st.table(id).seen)
		for _, h := range list[:min(flushes.NamesKept, len(list))] {
			severity.Notices(klog.FromContext(ctx)).Info(partAccepted, "table", id.String(), "part", partOf(h), "reason", h.Reason)
		}
		st.families[id.Family].examined.plan(now)
	}
	st.relearn(st.generation.learned.WithoutQuarantined(dismissed), now, slices.Collect(maps.Values(st.families))...)
	if waiting = st.quarantine.rules.Count(); waiting > 0 {
		st.quarantine.retry.In(0, now)
	}
	return dismissed.Count(), waiting
}

// quarantined returns the quarantined rules for a Status, and the chains that wait. Rules that
// wait are last in the list, so that they hide no rule that they wait for.
func (st *state) quarantined() ([]api.Quarantined, []api.WaitingChain) {
	var list, waits []api.Quarantined
	missing, waiting := st.quarantine.rules.Split()
	for _, part := range []reload.Quarantine{missing, waiting} {
		for _, id := range flushes.TableIDs() {
			for _, h := range part[id] {
				q := api.QuarantinedOf(id, h)
				if len(list) < api.QuarantinedShown {
					list = append(list, q)
				}
				if q.Waits {
					waits = append(waits, q)
				}
			}
		}
	}
	chains := api.WaitingChains(waits)
	return list, chains[:min(len(chains), api.QuarantinedShown)]
}
