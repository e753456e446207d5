package daemon

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A published is a Status as the loop publishes it: without the generation's ID. Readers
// compute the ID, because no step of the loop needs it, and the digest of 60,000 rules takes
// 10 ms.
type published struct {
	api.Status
	id func() string // of the generation; computed once, by the first reader
}

// complete returns the Status with the generation's ID. Any goroutine may call it.
func (p *published) complete() api.Status {
	s := p.Status
	s.Generation.ID = p.id()
	return s
}

// publish makes a Status of the state, for other goroutines and watchers to read, and sets the
// gauges that follow it. The loop calls it after its steps, and requests before they end.
func (d *Daemon) publish(st *state) {
	info := d.cfg.Kernel.Info()
	s := api.Status{
		Mode:             st.mode,
		Paused:           st.pause.on(),
		PausedUntil:      st.pause.until,
		PausedBy:         st.pause.by,
		PausedWhy:        st.pause.why,
		PausedSince:      st.pause.since,
		Contended:        st.contended(),
		Backend:          api.Backend{Name: info.Backend, Version: info.Version, Reason: st.choice.reason, Mixed: st.choice.mixed, Mismatch: st.choice.mismatch},
		DisabledFamilies: maps.Clone(d.cfg.Disabled),
		CanaryChain:      d.cfg.Canary,
		Generation:       d.generation(st),
		Stored:           st.disk.stored,
		Flushes:          slices.Clone(st.journal),
		SourceErrors:     st.declared.broken,
		DeclaredRefused:  slices.Clone(st.refused.shown[:min(len(st.refused.shown), api.QuarantinedShown)]),
		Opaque:           d.opaqueNow(st),
		LeftOut:          st.leftOutNow(),
		LedTo:            st.ledTo.shown,
		Protect:          d.cfg.Protect,
		Owners:           st.guards.found,
		IdleWords:        st.guards.idle,
		Unguarded:        st.unguardedNow(),
		LeadsOut:         st.leadsOut.shown,
		Accepted:         st.accepted.Lately(time.Now()),
		Stopped:          st.removed,
		Keeper:           d.keepers(st),
		Standby:          d.standbys(st),
	}
	if d.cfg.Store != nil {
		s.Baseline = st.baseline.Public()
	}
	if !st.removed {
		s.RulesWithoutOwner = d.ownerless(st, time.Now())
	}
	for f, fs := range st.families {
		if cause := fs.unreadable(); cause != "" {
			if s.Unreadable == nil {
				s.Unreadable = map[rules.Family]string{}
			}
			s.Unreadable[f] = cause
		}
	}
	s.Families = map[rules.Family]api.Verdicts{}
	for f := range st.families {
		s.Families[f] = api.Verdicts{}
	}
	for id, ts := range st.tables() {
		if ts.unmarked(id.Name) {
			continue
		}
		s.Families[id.Family][id.Name] = st.shownVerdict(id)
	}
	s.LastKnown = lastKnown(st)
	s.LossSince = st.observedSince
	d.publishMissing(st, &s)
	st.decision.addTo(&s)
	for _, o := range st.openRecords() {
		s.LossSince = pace.Earliest(s.LossSince, o.record.Time)
		if r, ok := st.shownRecord(o); ok {
			s.Flushes = slices.Insert(s.Flushes, 0, r)
		}
	}
	s.Failing = st.failing()
	d.publishNative(st, &s)
	if s.LastDrill = st.drills.Last; s.LastDrill == nil {
		s.LastDrill = api.LastDrillOf(st.journal)
	}
	s.LearningPendingSince = pendingSince(st)
	st.publishUnkept(&s)
	st.publishUnread(&s)
	s.JournalError = d.journalTrouble.Text()
	s.ListenRequired, s.ListenError = d.cfg.ListenRequired, d.listenTrouble.Text()
	st.quarantine.Status(&s)
	s.PolicyDrops = st.policyDrops()
	s.NothingProtected = d.nothing(st, s)
	health := s.Health()
	s.Healthy, s.Headline = health.Healthy(), health.String()
	d.cfg.Metrics.SetStatus(s)
	p := &published{s, d.generationID}
	d.watchers.give(p, func() { d.status.Store(p) })
}

// unreadable returns why the family's tables cannot be read; "" if they can, or if the kernel has
// no words for it.
func (fs *familyState) unreadable() string {
	cause := cmp.Or(fs.looked.trouble.Cause, fs.examined.trouble.Cause)
	for _, ts := range fs.tables {
		cause = cmp.Or(cause, ts.trouble.Cause)
	}
	return cause
}

// shownVerdict returns the verdict that a Status has for a table. A table with a refused rule keeps
// its former rules, so a read may call it drifted between two tries: the refusal is the reason.
func (st *state) shownVerdict(id rules.TableID) canary.Verdict {
	v := st.table(id).verdict
	switch {
	case st.removed:
		return canary.Unknown
	case v == canary.Drifted && st.declared.unapplied[id] && st.refuses(id):
		return canary.Refused
	case !v.Loss() && len(st.table(id).missing)+len(st.pods.MissedIn(id)) > 0:
		return st.table(id).missingKind(id)
	case v != canary.Intact && v != canary.Changed:
		return v
	case st.declared.unapplied[id] && !st.refuses(id):
		return canary.Drifted
	case st.quarantine.Count(id) > 0:
		return canary.Partial
	case st.declared.unapplied[id]:
		return canary.Refused
	default:
		return v
	}
}

// storedOf returns the generations on disk as a Status has them.
func storedOf(kept []reload.Kept) []api.StoredGeneration {
	var list []api.StoredGeneration
	for _, k := range reload.Offered(kept) {
		g := api.StoredGeneration{
			ID: k.ID, Saved: k.Saved, Captured: k.Captured, Source: k.Source, Made: k.Made, NearlyEmpty: k.Sparse, Foreign: k.Foreign,
		}
		if k.Counted {
			g.Rules, g.Chains = &k.Rules, &k.Chains
		}
		list = append(list, g)
	}
	return list
}

// generation describes the generation for the status, without its ID. Its counts are computed
// only when it changed.
func (d *Daemon) generation(st *state) api.Generation {
	if last := d.status.Load(); last != nil && d.edition == st.generation.edition {
		return last.Generation
	}
	d.edition = st.generation.edition
	want := st.want()
	g := api.Generation{Source: d.cfg.Source, Captured: st.generation.captured}
	perTable := map[rules.TableID]int{}
	for id, section := range want {
		perTable[id] = section.RuleCount()
		g.Rules, g.Chains = g.Rules+perTable[id], g.Chains+len(section.Chains)
	}
	d.cfg.Metrics.SetGeneration(g.Captured, perTable)
	d.generationID = func() string { return "" }
	if !g.Captured.IsZero() {
		d.generationID = sync.OnceValue(want.ID)
	}
	return g
}

// lastKnown returns when the content of all tables was last known, the earliest time of all
// families. It is zero if the content of one was never known. The disk and the status have it.
func lastKnown(st *state) time.Time {
	var last time.Time
	for _, fs := range st.families {
		if fs.known.at.IsZero() {
			return time.Time{}
		}
		last = pace.Earliest(last, fs.known.at)
	}
	return last
}

// pendingSince returns since when the tables have, or may have, rules that the generation
// lacks. A hint that waits for its family's budget counts too.
func pendingSince(st *state) time.Time {
	var since time.Time
	for _, fs := range st.families {
		since = pace.Earliest(since, fs.examined.dirty, fs.looked.unseen, fs.looked.unasked)
		if fs.anyTable(func(ts *tableState) bool { return ts.pending }) {
			since = pace.Earliest(since, fs.examined.moved)
		}
	}
	return since
}
