package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// tableState is the loop's knowledge of one table.
type tableState struct {
	verdict canary.Verdict
	seen    rules.Section // of the last read
	known   bool          // seen is of a read
	pending bool          // the generation does not have all of seen yet
	trouble pace.Trouble  // why the table could not be read
	// learningStopped: observe mode read a loss, which lasts until the owner has put its rules
	// back; see take.
	learningStopped bool
	// spared: the table has no marks, because nothing is protected in it, and it does not exist
	// or is guarded on demand.
	spared bool
	placed []placed // jumps that replays put back within the last grace
	// jumpsMissing is the number of jumps that the last full read lacked.
	jumpsMissing int
	// inForce is the digest of the last read around a write that showed the whole table in
	// force.
	inForce uint64
	// missing holds rules that the last full read lacked, and that their owner may be about to
	// write.
	missing     []missing
	missingSaid time.Time // when the log said so last
	policies    accepted.Policies
	// doubted has the chains whose former rules keepDoubted keeps, and the times since
	// when they lack some.
	doubted map[string]time.Time
	// settled is the last read whose whole content the generation has.
	settled culprit.Read
	// standing is the table as the last read showed it while nothing was lost.
	standing standing
}

// newTables returns the tables of a family before any read.
func newTables() map[rules.TableName]*tableState {
	tables := map[rules.TableName]*tableState{}
	for _, t := range protect.Tables() {
		tables[t] = &tableState{verdict: canary.Unknown}
	}
	return tables
}

// known holds the times at which a family's content was known.
type known struct {
	at        time.Time // when the content of all tables was last known; zero: never
	natIntact time.Time // when nat was last known to hold the whole generation; zero: never
}

// A source is the kind of read that showed a finding. It decides how take handles the finding.
type source int

const (
	// lossesOnly: a probe of the marks, or a read while replays are paused. A table without a
	// loss keeps its verdict.
	lossesOnly source = iota
	// watching: a read in observe mode. It stops learning for tables that lost something.
	watching
	// readInFull: an examination, or the reads around a write.
	readInFull
)

// A tableFinding is a finding about one table.
type tableFinding struct {
	id      rules.TableID
	source  source
	finding canary.Finding

	// The other fields are of a table that was read in full.
	mark   canary.Mark
	absent bool         // the table does not exist
	table  *rules.Table // nil if it does not exist, or was not read
	read   bool         // false: the table was written, and not read
	proved bool         // a read after a write showed everything in force
	// section is the protected part of the table.
	section rules.Section
}

// bare reports whether the table was read, and neither holds nor ought to hold anything
// protected. Its marks are yet to be planted, and nothing would be lost with it: take keeps its
// verdict.
func (x tableFinding) bare(want rules.Section) bool {
	return x.read && x.finding.Err == nil && x.mark.Nonce == "" && x.section.Bare() && want.Bare()
}

// take takes a finding into the state of its table. Probes, examinations, writes, observe mode
// and pauses all end here. Besides take, only learn and setUnknown set a verdict. take returns
// false while learning stays stopped for the table.
//
// While learning is stopped, the table counts as lost, also if a read shows it intact. That
// ends when a write is proved, or when a read shows everything that ought to be in force. Marks
// that are lost once more are a loss of their own.
func (d *Daemon) take(st *state, x tableFinding) bool {
	ts, v := st.table(x.id), x.finding.Verdict
	if x.source == readInFull {
		d.takeMarks(st, ts, x)
		if x.read && x.finding.Err == nil {
			d.followPolicies(st, x.id, x.section.Policies)
		}
	}
	switch {
	case x.proved:
		ts.verdict, ts.learningStopped = canary.Intact, false
	case x.source != readInFull:
		if v.Loss() {
			ts.verdict, ts.learningStopped = v, ts.learningStopped || x.source == watching
		}
	case ts.learningStopped && !x.finding.MarkLost:
		if v.Loss() || v == canary.Unknown || !canary.Covers(st.want()[x.id], x.table) {
			return false
		}
		ts.verdict, ts.learningStopped = canary.Intact, false
	case v == canary.Unknown && ts.verdict.Loss():
		// A loss stays one until a read shows the table: a failed read puts no rule back.
	case v == canary.Unknown && (ts.verdict == canary.Intact || ts.verdict == canary.Changed) && x.bare(st.want()[x.id]):
		// Another program has made the table, which did not exist when all was known.
	default:
		ts.verdict = v
	}
	return true
}

// takeMarks notes the marks that a full read showed, and the number of jumps that it lacked,
// for take. A table with nothing to guard is spared.
func (d *Daemon) takeMarks(st *state, ts *tableState, x tableFinding) {
	f, t := x.id.Family, x.id.Name
	if known, there := st.marks.current[x.id]; !there || !known.Equal(x.mark) {
		st.marks.current = st.marks.current.With(x.id, x.mark)
	}
	ts.spared = x.mark.Nonce == "" && d.spares(st, f, t) && (x.absent || protect.OnDemand(t) && x.bare(st.want()[x.id]))
	if ts.spared && protect.OnDemand(t) {
		st.marks.current = st.marks.current.Without(x.id)
		ts.jumpsMissing, ts.missing = 0, nil
		d.cfg.Metrics.ForgetTable(x.id)
		return
	}
	switch {
	case x.proved:
		// A replay brings back lost jumps. A renewal of marks leaves jumps that wait for their
		// owner.
		ts.jumpsMissing = lackedBy(x.id, x.section, x.finding.Waiting)
		ts.missing = slices.DeleteFunc(ts.missing, func(m missing) bool { return m.stands(x.id, x.section) })
		d.cfg.Metrics.SetCanaryPresent(f, t, true)
	case x.read:
		ts.jumpsMissing = len(x.finding.Jumps) + len(x.finding.Waiting)
		ts.forgetReturned(x.id, x.finding)
	}
	d.cfg.Metrics.SetJumpsMissing(f, map[rules.TableName]int{t: ts.jumpsMissing})
}

// setUnknown notes that the state of the family's tables is unknown now, because a probe or a
// read failed. Lost tables stay lost.
func (fs *familyState) setUnknown() {
	for _, ts := range fs.tables {
		if !ts.verdict.Loss() {
			ts.verdict = canary.Unknown
		}
	}
}

// setSection notes the section that a read showed of a table, and when it changed last. Some
// graces and clean-ups wait until the family is quiet.
func (fs *familyState) setSection(t rules.TableName, section rules.Section, now time.Time) {
	ts := fs.tables[t]
	if ts.known && !ts.seen.Equal(section) {
		fs.examined.moved = now
	}
	ts.seen, ts.known = section, true
}

// learn takes seen, a table's section, into the generation. takeExamined and takeWritten call it
// after a read without a loss, at now. takeWritten also calls it for a new table that lost its
// first marks before the proof, with a finding Intact. learn plans a read if a removal waits, and
// new marks if rules changed. A table that is guarded on demand and holds nothing to guard leaves
// the generation.
func (d *Daemon) learn(ctx context.Context, st *state, id rules.TableID, seen rules.Section, finding canary.Finding, now time.Time) {
	f, t := id.Family, id.Name
	fs, ts := st.families[f], st.table(id)
	fs.setSection(t, seen, now)
	if ts.unmarked(t) {
		ts.verdict, ts.pending = canary.Intact, false
		if st.generation.learned.Knows(f, t) {
			st.relearn(st.generation.learned.Without(id), now)
		}
		return
	}
	learned := st.generation.learned
	before, first := learned.Generation[id], !learned.Knows(f, t)
	seen, podsWait := d.learnable(ctx, st, id, seen, now)
	seen, doubtOver := d.keepDoubted(st, id, seen, now)
	next, again := learned.Learn(f, t, seen, finding, now)
	next = d.releaseRemoved(ctx, st, id, before, next)
	changed := !before.Equal(next.Generation[id])
	if !first && changed {
		st.accept(id, before, next.Generation[id], now)
	}
	st.generation.learned = next
	ts.verdict = canary.Intact
	if ts.pending = !again.IsZero() || !doubtOver.IsZero() || len(finding.Waiting) > 0 || podsWait; ts.pending {
		ts.verdict = canary.Changed
		fs.examined.plan(again)
	}
	if !doubtOver.IsZero() { // reads next to a busy writer keep their pauses
		fs.examined.plan(pace.Latest(doubtOver, fs.examined.readEnd.Add(fs.examined.pause)))
	}
	switch {
	case first && protect.OnDemand(t): // its owner wrote its first rule
		st.generation.made = reload.MadeByOwners
		st.relearn(next, now)
	case first:
		st.generation.made = reload.MadeAtStart
		st.relearn(next, now)
	case changed:
		st.generation.made = reload.MadeByOwners
		st.relearn(next, now)
		fs.rotation.plan(now)
		if d.noteRemoval(st, id, before, next.Generation[id], now) {
			fs.rotation.hold(now) // it may be a purge, which takes the marks, too
		}
		if !fs.rotation.released && !reload.RemovalOf(id, next.Generation[id], before, now).Empty() {
			fs.rotation.letGo() // restoring an older file would remove the added rules
		}
	}
}

// learnable returns the part of a read that the generation may take. To seen, a section, it adds
// the quarantined rules, and the rules of running pods that are missing for less than their
// grace. It takes away declared rules and doubles of jumps. podsWait: it added rules of pods.
func (d *Daemon) learnable(ctx context.Context, st *state, id rules.TableID, seen rules.Section, now time.Time) (_ rules.Section, podsWait bool) {
	before := st.generation.learned.Generation[id]
	seen = d.supplement(ctx, st, id, seen)
	if id.Name == rules.Nat {
		kept, _ := st.pods.KeptFor(id.Family)
		seen, podsWait = reload.KeepContainers(before, seen, kept), len(kept) > 0
	}
	_, seen = seen.Split(st.declared.now.Claims)
	return d.withoutDoubles(st.families[id.Family], st.table(id), before, seen, now), podsWait
}

// unmarked reports whether the table is guarded on demand, and holds nothing to guard.
func (ts *tableState) unmarked(t rules.TableName) bool { return ts.spared && protect.OnDemand(t) }

// lacks reports whether the family has a loss that a replay answers.
func (fs *familyState) lacks() bool {
	return fs.anyTable(func(ts *tableState) bool { return ts.verdict.Loss() && !ts.learningStopped })
}

// learningStopped reports whether the learning of a table of the family is stopped.
func (fs *familyState) learningStopped() bool {
	return fs.anyTable(func(ts *tableState) bool { return ts.learningStopped })
}

// unknown reports whether a table of the family could not be read.
func (fs *familyState) unknown() bool {
	return fs.anyTable(func(ts *tableState) bool { return ts.verdict == canary.Unknown })
}

// lost reports whether a table of the family is lost.
func (fs *familyState) lost() bool {
	return fs.anyTable(func(ts *tableState) bool { return ts.verdict.Loss() })
}

// anyTable reports whether is returns true for any table of the family.
func (fs *familyState) anyTable(is func(*tableState) bool) bool { return anyOf(fs.tables, is) }

// table returns the state of a table.
func (st *state) table(id rules.TableID) *tableState { return st.families[id.Family].tables[id.Name] }

// probeResult returns the label that a probe has in metrics, by the family's present verdicts.
// By it, setKnown, setSound and openWindow see whether the family is intact.
func (fs *familyState) probeResult() metrics.ProbeResult {
	switch {
	case fs.lost():
		return metrics.ProbeLoss
	case fs.unknown():
		return metrics.ProbeUnknown
	default:
		return metrics.ProbeIntact
	}
}

// setKnown notes that the family's content was known at: a full read, a probe or an unchanged
// exact stamp showed it. A loss began after known.at (flush record), and a stale flow after
// known.natIntact (sweep). A pending change or an unreadable table blocks both; any loss blocks
// natIntact.
func (fs *familyState) setKnown(at time.Time) {
	if !fs.examined.dirty.IsZero() || fs.probeResult() == metrics.ProbeUnknown {
		return
	}
	fs.known.at = at
	// While something is lost, only the marks of the other tables were looked at.
	if nat := fs.tables[rules.Nat]; fs.probeResult() == metrics.ProbeIntact && nat != nil && nat.verdict == canary.Intact {
		fs.known.natIntact = at
	}
}

// setSettled notes a full read after which the generation has all of an intact table; a changed
// table still waits. noteRemoval searches for the process that removes rules later from this
// read on.
func (ts *tableState) setSettled(at culprit.Read) {
	if ts.verdict == canary.Intact {
		ts.settled = at
	}
}

// setSound notes the digest of a read that showed nothing lost or missing. The search for
// culprits begins there where marks are no evidence (Charge.Sound).
func (fs *familyState) setSound(digest uint64) {
	missing := fs.anyTable(func(ts *tableState) bool { return ts.jumpsMissing > 0 })
	if !missing && fs.probeResult() == metrics.ProbeIntact {
		fs.examined.sound = digest
	}
}
