package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// quarantine are the rules that cannot be put back yet.
type quarantine struct {
	rules reload.Quarantine
	tryAt time.Time // when they are tried again; zero: there are none
	wait  time.Duration
	// stood are the chains that quarantined rules lacked when they were put
	// there, and that the last examination saw.
	stood map[rules.Family]map[iptables.Place]bool
}

// recallHeld takes up what the last run knew of what rules lean on.
func (d *Daemon) recallHeld(ctx context.Context, st *state, known reload.Quarantine) {
	for id, list := range known {
		if st.families[id.Family] != nil {
			d.holdBack(st, id.Family, id.Name, list)
		}
	}
	d.recallSets(ctx, st)
}

// holdBack takes a replay's quarantine of one table into the state.
func (d *Daemon) holdBack(st *state, f rules.Family, t rules.TableName, list []reload.Held) {
	before := st.quarantine.rules[f.Table(t)]
	st.quarantine.rules = st.quarantine.rules.With(f.Table(t), list)
	d.cfg.Metrics.SetQuarantined(f, t, len(list))
	for _, h := range list {
		delete(st.quarantine.stood[f], iptables.Place{Table: t, Chain: h.Lacks})
	}
	switch {
	case st.quarantine.rules.Count() == 0:
		st.quarantine.tryAt, st.quarantine.wait = time.Time{}, 0
	case len(list) > len(before):
		st.quarantine.wait = firstTry
		st.quarantine.tryAt = time.Now().Add(st.quarantine.wait)
	}
}

// logHeld names what is held back, and what was written without a match that only
// counts.
func (d *Daemon) logHeld(ctx context.Context, result reload.Result) {
	log := klog.FromContext(ctx)
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			tr := result[f].Tables[t]
			for _, h := range tr.Quarantined[:min(namesKept, len(tr.Quarantined))] {
				next := "it is tried again"
				if _, opaque := h.Rule.Opaque(); opaque {
					next = "its owner has to put it back"
				}
				log.Info("A rule is in quarantine: it could not be put back", "family", f, "table", t,
					"chain", h.Chain, "rule", h.Rule.Spec, "reason", h.Reason, "next", next)
			}
			for _, h := range tr.Weakened[:min(namesKept, len(tr.Weakened))] {
				log.Info("A rule was put back without its nfacct match, which only counts", "family", f, "table", t,
					"chain", h.Chain, "rule", h.Rule.Spec, "reason", h.Reason)
			}
		}
	}
}

// readmit puts back what is in quarantine and can be had by now.
func (d *Daemon) readmit(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	held := st.quarantine.rules.Count()
	var families []rules.Family
	for _, f := range d.cfg.Kernel.Families() {
		if len(tableid.Of(st.quarantine.rules, f)) > 0 {
			families = append(families, f)
		}
	}
	st.quarantine.wait = longer(st.quarantine.wait)
	st.quarantine.tryAt = time.Now().Add(st.quarantine.wait)
	result, err := d.replayer(ctx, st).Readmit(ctx, d.job(st, families...))
	for f, fr := range result {
		d.applyResult(st, f, fr)
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
	if left := st.quarantine.rules.Count(); left < held {
		log.Info("Rules came back from quarantine", "rules", held-left, "left", left)
	}
}

// noteReturn tries again what is in quarantine when a chain that it lacked comes
// back. If that does not help, the chain's standing there is no reason to try
// more often than otherwise.
func (st *state) noteReturn(snapshot iptables.Snapshot) {
	now, before := st.quarantine.rules.Standing(snapshot), st.quarantine.stood[snapshot.Family]
	for place := range now {
		if !before[place] {
			st.quarantine.tryAt = earliest(st.quarantine.tryAt, time.Now())
		}
	}
	if st.quarantine.stood == nil {
		st.quarantine.stood = map[rules.Family]map[iptables.Place]bool{}
	}
	st.quarantine.stood[snapshot.Family] = now
}

// supplement returns what was read of a table as if what is held back stood there.
func (d *Daemon) supplement(st *state, f rules.Family, t rules.TableName, seen rules.Section) rules.Section {
	if len(st.quarantine.rules[f.Table(t)]) == 0 {
		return seen
	}
	seen, next := st.quarantine.rules.Supplement(f, t, st.want()[f.Table(t)], seen)
	if len(next[f.Table(t)]) != len(st.quarantine.rules[f.Table(t)]) {
		d.holdBack(st, f, t, next[f.Table(t)])
	}
	return seen
}

// quarantined returns what is in quarantine as a Status has it.
func (st *state) quarantined() []api.Quarantined {
	var list []api.Quarantined
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			for _, h := range st.quarantine.rules[f.Table(t)] {
				if len(list) < api.QuarantinedShown {
					list = append(list, api.Quarantined{Family: f, Table: t, Chain: h.Chain, Rule: h.Rule.Spec, Reason: h.Reason})
				}
			}
		}
	}
	return list
}
