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
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Sets has what rules lean on beside chains: *iptables.Sets or
// *iptablestest.Sets.
type Sets interface {
	reload.Supplier
	// Save returns those of the named ipsets that exist, with their members, and
	// beside them an error about those that cannot be kept.
	Save(ctx context.Context, names []string) (map[string]iptables.Set, error)
}

// leaning is what the loop knows of what rules lean on beside chains.
type leaning struct {
	quarantine reload.Quarantine
	readmitAt  time.Time // when what is in quarantine is tried again; zero: nothing is
	readmitIn  time.Duration
	// stood are the chains that rules in quarantine lacked when they were put
	// there, and that the last examination saw.
	stood   map[rules.Family]map[iptables.Place]bool
	sets    map[string]iptables.Set // as captured
	needs   []string                // the ipsets that the generation names
	needsOf int                     // the edition that needs are of
	unkept  string                  // why sets could not be captured, as the log has it
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

// recallSets takes up the ipsets that the last run knew.
func (d *Daemon) recallSets(ctx context.Context, st *state) {
	var err error
	if st.sets, err = d.cfg.Store.LoadSets(); err != nil {
		klog.FromContext(ctx).Error(err, "The stored ipsets are not used; one that is missing now cannot be put back")
	}
}

// holdBack takes a replay's quarantine of one table into the state.
func (d *Daemon) holdBack(st *state, f rules.Family, t rules.TableName, list []reload.QuarantinedRule) {
	before := st.quarantine[f.Table(t)]
	st.quarantine = st.quarantine.With(f.Table(t), list)
	d.cfg.Metrics.SetQuarantined(f, t, len(list))
	for _, h := range list {
		delete(st.stood[f], iptables.Place{Table: t, Chain: h.MissingChain})
	}
	switch {
	case st.quarantine.Count() == 0:
		st.readmitAt, st.readmitIn = time.Time{}, 0
	case len(list) > len(before):
		st.readmitIn = firstTry
		st.readmitAt = time.Now().Add(st.readmitIn)
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
	held := st.quarantine.Count()
	var families []rules.Family
	for _, f := range d.cfg.Kernel.Families() {
		if len(tableid.Of(st.quarantine, f)) > 0 {
			families = append(families, f)
		}
	}
	st.readmitIn = longer(st.readmitIn)
	st.readmitAt = time.Now().Add(st.readmitIn)
	result, err := d.replayer(ctx, st).Readmit(ctx, d.job(st, families...))
	for f, fr := range result {
		d.applyResult(st, f, fr)
		d.countRefusal(f, fr.Err)
		if !fr.Outcome.Done() && !fr.DoneExceptQuarantined() {
			err = errors.Join(err, fr.Err)
		}
	}
	d.countLocked(st, result, err)
	st.lookAt = time.Now()
	log := klog.FromContext(ctx)
	if err != nil {
		log.V(1).Info("What is in quarantine could not be put back yet", "reason", err)
	}
	if left := st.quarantine.Count(); left < held {
		log.Info("Rules came back from quarantine", "rules", held-left, "left", left)
	}
}

// noteReturn tries again what is in quarantine when a chain that it lacked comes
// back. If that does not help, the chain's standing there is no reason to try
// more often than otherwise.
func (st *state) noteReturn(snapshot iptables.Snapshot) {
	now, before := st.quarantine.Standing(snapshot), st.stood[snapshot.Family]
	for place := range now {
		if !before[place] {
			st.readmitAt = earliest(st.readmitAt, time.Now())
		}
	}
	if st.stood == nil {
		st.stood = map[rules.Family]map[iptables.Place]bool{}
	}
	st.stood[snapshot.Family] = now
}

// supplement returns what was read of a table as if what is held back stood there.
func (d *Daemon) supplement(st *state, f rules.Family, t rules.TableName, seen rules.Section) rules.Section {
	if len(st.quarantine[f.Table(t)]) == 0 {
		return seen
	}
	seen, next := st.quarantine.Supplement(f, t, st.want()[f.Table(t)], seen)
	if len(next[f.Table(t)]) != len(st.quarantine[f.Table(t)]) {
		d.holdBack(st, f, t, next[f.Table(t)])
	}
	return seen
}

// captureSets reads the ipsets that the generation's rules name: all, or only if
// one is not known yet, for members change without a rule that does. A set that is
// missing now is kept as it was: only its owner can have taken it away, and with
// it the rules; or a flusher did, and it is to come back.
func (d *Daemon) captureSets(ctx context.Context, st *state, all bool) {
	if d.cfg.Sets == nil || !all && st.needsOf == st.edition {
		return
	}
	if st.needsOf != st.edition {
		st.needsOf, st.needs = st.edition, nil
		for _, g := range []rules.Generation{st.want(), st.decision.lost()} {
			for _, s := range g {
				st.needs = append(st.needs, s.Needs().Sets...)
			}
		}
		slices.Sort(st.needs)
		st.needs = slices.Compact(st.needs)
	}
	unknown := slices.ContainsFunc(st.needs, func(name string) bool { _, ok := st.sets[name]; return !ok })
	if len(st.needs) == 0 || !all && !unknown {
		return
	}
	found, err := d.cfg.Sets.Save(ctx, st.needs)
	next := map[string]iptables.Set{}
	keep := slices.Clone(st.needs)
	for i := 0; i < len(keep); i++ {
		set, ok := found[keep[i]]
		if !ok {
			set, ok = st.sets[keep[i]]
		}
		if _, known := next[keep[i]]; ok && !known {
			next[keep[i]] = set
			keep = append(keep, set.Lists()...)
		}
	}
	changed := !maps.EqualFunc(next, st.sets, equalSets)
	st.sets = next
	trouble := ""
	if changed && d.cfg.Store != nil {
		err = errors.Join(err, d.cfg.Store.SaveSets(next))
	}
	if err != nil {
		trouble = err.Error()
	}
	if trouble != st.unkept && trouble != "" {
		klog.FromContext(ctx).Error(err, "Not every ipset that protected rules name is kept; one that is not cannot be put back")
	}
	st.unkept = trouble
}

func equalSets(a, b iptables.Set) bool {
	return a.Name == b.Name && a.Create == b.Create && slices.Equal(a.Members, b.Members)
}

// quarantined returns what is in quarantine as a Status has it.
func (st *state) quarantined() []api.Quarantined {
	var list []api.Quarantined
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			for _, h := range st.quarantine[f.Table(t)] {
				if len(list) < api.QuarantinedShown {
					list = append(list, api.Quarantined{Family: f, Table: t, Chain: h.Chain, Rule: h.Rule.Spec, Reason: h.Reason})
				}
			}
		}
	}
	return list
}
