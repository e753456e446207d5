package daemon

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unguardedGrace is how long rules of a table in which nothing is protected have to stay away
// before that is said: their owner may be about to write them again.
const unguardedGrace = 2 * time.Second

// unguarded is what reads showed of a table that is guarded on demand while nothing is protected in
// it: there are no marks whose loss would show a flush. canaryd puts nothing back there, and says
// how many rules a flush took.
type unguarded struct {
	before *rules.Table // as the last read showed it from which not much was missing
	since  time.Time    // when much was first missing; zero: it is not
	came   time.Time    // at or after which that came
	upto   uint64       // the digest of the read that showed it
}

// lookAtUnguarded compares the tables that have no marks because they are guarded on demand with
// those of the read before. Of a table that could not be read it is not known what it lost.
func (d *Daemon) lookAtUnguarded(st *state, f rules.Family, seen map[rules.TableName]*rules.Table, now time.Time) {
	fs := st.families[f]
	looksAt := func(t rules.TableName) bool { _, read := seen[t]; return read && fs.tables[t].unmarked(t) }
	maps.DeleteFunc(fs.unguarded, func(t rules.TableName, _ unguarded) bool { return !looksAt(t) })
	for _, t := range protect.Tables() {
		if !looksAt(t) {
			continue
		}
		table := seen[t]
		u := fs.unguarded[t]
		a, much := goneFrom(u.before, table)
		switch {
		case !much:
			u = unguarded{before: table}
		case u.since.IsZero():
			u.since, u.came, u.upto = now, fs.examined.since, fs.examined.digest
			fs.examined.plan(now.Add(unguardedGrace))
		case now.Sub(u.since) < unguardedGrace:
			fs.examined.plan(u.since.Add(unguardedGrace))
		default:
			a.Time, a.Family, a.Table, a.seen, a.upto = now, f, t, u.came, u.upto
			st.accepted.fresh, st.accepted.at = append(st.accepted.fresh, a), now
			d.cfg.Metrics.ObserveUnprotected(f, t, a.Rules, false)
			u = unguarded{before: table}
		}
		if fs.unguarded == nil {
			fs.unguarded = map[rules.TableName]unguarded{}
		}
		fs.unguarded[t] = u
	}
}

// goneFrom returns what a table lost, and whether that is much: all that it held, or more than half
// of it. What its owner wrote in the place of other rules is not lost.
func goneFrom(before, now *rules.Table) (a acceptance, much bool) {
	if before == nil || leavesOut(before) || leavesOut(now) {
		return a, false
	}
	a.NotGuarded = true
	was := 0
	for _, c := range before.Chains {
		left := len(now.Rules(c.Name))
		was += len(c.Rules)
		if left < len(c.Rules) {
			a.Rules += len(c.Rules) - left
			a.finding.Emptied = append(a.finding.Emptied, c.Name)
		}
	}
	if now != nil {
		for _, c := range now.Chains {
			a.Left += len(c.Rules)
		}
	}
	return a, a.Rules > 0 && 2*a.Left < was
}

// leavesOut reports whether a table has a chain of which the rules were not read.
func leavesOut(t *rules.Table) bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c rules.Chain) bool { return c.LeftOut() })
}
