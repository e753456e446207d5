package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// quarantine are the rules that cannot be put back yet.
type quarantine struct {
	rules reload.Quarantine
	retry retry // when they are tried again
	// stood are the chains that quarantined rules lacked when they were put
	// there, and that the last examination saw.
	stood map[rules.Family]map[iptables.Place]bool
}

// setQuarantine takes up which rules of one table are quarantined; seen is what was read of it.
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
		st.quarantine.retry = retry{}
	case len(list) > len(before):
		st.quarantine.retry.in(firstTry, time.Now())
	}
}

// logQuarantined logs the rules that are quarantined, and those that were written without a
// match that only counts.
func (d *Daemon) logQuarantined(ctx context.Context, result reload.Result) {
	log := klog.FromContext(ctx)
	for id, tr := range tablesOf(result) {
		for _, h := range tr.Quarantined[:min(namesKept, len(tr.Quarantined))] {
			next := "it is tried again"
			if _, opaque := h.Rule.Opaque(); h.Waits {
				next = "it is put back with the rule that it waits for"
			} else if opaque {
				next = "its owner has to put it back"
			}
			log.Info("A rule is in quarantine: it could not be put back", "family", id.Family, "table", id.Name,
				"chain", h.Chain, "rule", h.Rule.Label(), "reason", h.Reason, "next", next)
		}
		for _, h := range tr.Weakened[:min(namesKept, len(tr.Weakened))] {
			log.Info("A rule was put back without its nfacct match, which only counts", "family", id.Family, "table", id.Name,
				"chain", h.Chain, "rule", h.Rule.Label(), "reason", h.Reason)
		}
	}
}

// readmit puts quarantined rules back as far as that is possible by now.
func (d *Daemon) readmit(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	before := st.quarantine.rules.Count()
	var families []rules.Family
	for _, f := range d.cfg.Kernel.Families() {
		if len(tableid.Of(st.quarantine.rules, f)) > 0 {
			families = append(families, f)
		}
	}
	st.quarantine.retry.failed(nil, time.Now())
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
		log.V(1).Info("What is in quarantine could not be put back yet", "reason", err)
	}
	if left := st.quarantine.rules.Count(); left < before {
		log.Info("Rules came back from quarantine", "rules", before-left, "left", left)
	}
}

// readmitReturned plans a try of quarantined rules when a chain that they lacked comes back.
// One that stood at the last examination already is no reason.
func (st *state) readmitReturned(snapshot iptables.Snapshot) {
	now, before := st.quarantine.rules.Standing(snapshot), st.quarantine.stood[snapshot.Family]
	for place := range now {
		if !before[place] {
			st.quarantine.retry.at = earliest(st.quarantine.retry.at, time.Now())
		}
	}
	st.quarantine.stood[snapshot.Family] = now
}

// supplement returns what was read of a table as if its quarantined rules stood there.
func (d *Daemon) supplement(st *state, id rules.TableID, seen rules.Section) rules.Section {
	before := st.quarantine.rules[id]
	if len(before) == 0 {
		return seen
	}
	full, next := st.quarantine.rules.Supplement(id.Family, id.Name, st.want()[id], seen)
	if len(next[id]) != len(before) {
		d.setQuarantine(st, id, next[id], seen)
	}
	return full
}

// quarantines reports whether one of these tables has a rule in quarantine.
func (st *state) quarantines(tables verdicts) bool {
	for id := range tables {
		if len(st.quarantine.rules[id]) > 0 {
			return true
		}
	}
	return false
}

// dismissQuarantined accepts that what is in quarantine is lost, and returns how many rules that
// are. What was declared stays declared, and is tried again.
func (d *Daemon) dismissQuarantined(ctx context.Context, st *state) int {
	q, now := st.quarantine.rules, time.Now()
	for id, list := range q {
		d.setQuarantine(st, id, nil, st.table(id).seen)
		for _, h := range list[:min(namesKept, len(list))] {
			klog.FromContext(ctx).Info("An operator has accepted that a rule in quarantine is lost", "family", id.Family, "table", id.Name,
				"chain", h.Chain, "rule", h.Rule.Label(), "reason", h.Reason)
		}
		st.families[id.Family].examined.plan(now)
	}
	if n := q.Count(); n > 0 {
		st.relearn(st.generation.learned.WithoutQuarantined(q), now, slices.Collect(maps.Values(st.families))...)
	}
	return q.Count()
}

// quarantined returns what is in quarantine as a Status has it.
func (st *state) quarantined() []api.Quarantined {
	var list []api.Quarantined
	for _, id := range tableIDs() {
		for _, h := range st.quarantine.rules[id] {
			if len(list) < api.QuarantinedShown {
				list = append(list, api.QuarantinedOf(id, h))
			}
		}
	}
	return list
}
