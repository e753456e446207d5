package daemon

import (
	"maps"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unguardedGrace is how long a table without protected rules must lack rules before canaryd
// reports it: their owner may be about to write them again.
const unguardedGrace = 2 * time.Second

// unguarded holds reads of a table that is guarded on demand while nothing is protected in it.
// Such a table has no marks whose loss would show a flush. canaryd puts nothing back there, and
// reports how many rules a flush took.
type unguarded struct {
	before *rules.Table // the last read from which not much was missing
	since  time.Time    // when much was first missing; zero: it is not
	came   time.Time    // the earliest time of that loss
	upto   uint64       // the digest of the read that showed it
}

// lookAtUnguarded compares the tables that have no marks because they are guarded on demand
// with the read before, and reports their losses. seen has the tables that were read, nil for
// one that does not exist. If a table could not be read, its losses are not known.
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
		a, much := accepted.GoneFrom(u.before, table)
		switch {
		case !much:
			u = unguarded{before: table}
		case u.since.IsZero():
			u.since, u.came, u.upto = now, fs.examined.since, fs.examined.digest
			fs.examined.plan(now.Add(unguardedGrace))
		case now.Sub(u.since) < unguardedGrace:
			fs.examined.plan(u.since.Add(unguardedGrace))
		default:
			a.Time, a.Family, a.Table, a.Seen, a.Upto = now, f, t, u.came, u.upto
			st.accepted.Add(a, now)
			d.cfg.Metrics.ObserveUnprotected(f, t, a.Rules, false)
			u = unguarded{before: table}
		}
		if fs.unguarded == nil {
			fs.unguarded = map[rules.TableName]unguarded{}
		}
		fs.unguarded[t] = u
	}
}

// A standing is a table as a read showed it, while nothing was lost in it.
type standing struct {
	table  *rules.Table // nil: nothing was read yet, or there is no such table
	digest uint64
}

// setStanding notes a table as a read showed it, if nothing is lost in it. After a flush its
// other rules are compared with this.
func (ts *tableState) setStanding(table *rules.Table, digest uint64) {
	if !ts.verdict.Loss() && ts.verdict != canary.Unknown && digest != 0 {
		ts.standing = standing{table, digest}
	}
}

// unprotectedGone counts the rules that --protect does not name and that the same flush took.
// The count is unsure if the table was not read right before, or if another process wrote to it
// as well. A loss under intact marks is no flush: rules of others are not near it.
func (d *Daemon) unprotectedGone(st *state, id rules.TableID, h flushes.Hit, q culprit.Inquiry) (gone int, unsure bool) {
	if !h.TookMarks() {
		return 0, false
	}
	intact, before := st.families[id.Family].looked.intact, st.table(id).standing
	// A look in the middle of the flush finds tables intact that the flusher takes later.
	asOf := before.digest == intact || !q.Legacy && q.Takings.Reach(uint32(before.digest))
	if before.table == nil || !asOf || q.OthersWrote(id, uint32(before.digest), uint32(h.Seen), h.By) {
		return 0, true
	}
	return d.protection(st).OthersIn(before.table, st.want()[id], canary.IsMark).Gone(h.Table), false
}
