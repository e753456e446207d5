// Package quarantine keeps the parts of tables that could not be put back yet: when each table is
// tried again, and which flush records end with them.
//
// A part is a rule of an iptables table ([State.SetRules]), or a part of a native table
// ([State.SetHeld]). The loop passes the new list of a table after each write or read that changes
// it, and calls [State.Due] at [State.At] for the tables to try. [State.Take] logs the changes, and
// returns the flushes that lack no part any more. [State.Status] lists the parts.
//
// No function fails. A State belongs to the loop's goroutine; the lists that it returns are values.
package quarantine

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// OwnersPause is how long an owner that writes parts one by one may pause between two of them.
const OwnersPause = 2 * time.Second

// A Cause is the reason why a table's list changes.
type Cause int

// The causes.
const (
	Replay   Cause = iota // canaryd has written the table
	Owner                 // its owner has written the table
	Operator              // an operator accepts that parts are lost
	GivenUp               // canaryd cannot know whether parts belong into the table
	Recall                // the last run left the parts
)

// ends are the ways in which a record with parts in quarantine ends, the worst one last.
var ends = []api.Outcome{reload.Proved, reload.Raced, api.OwnersDecision, api.Dismissed, reload.Partial}

// worse returns the later one of ends; "" is before all.
func worse(a, b api.Outcome) api.Outcome {
	if slices.Index(ends, b) > slices.Index(ends, a) {
		return b
	}
	return a
}

// A State has the parts in quarantine of all tables. The zero State has none.
type State struct {
	tables map[tableid.TableID]*table
	said   []change // not logged yet
	ended  []Ended
}

// A table has the parts of one table, of one kind.
type table struct {
	rules []reload.QuarantinedRule
	held  []native.Held
	retry pace.Retry      // zero: they are not tried, because the table is left out
	stood map[string]bool // the missing chains of rules that the last read saw
}

// An Ended is a flush without a part in quarantine, and the outcome of its record. The outcome is
// partial if its last part was given up.
type Ended struct {
	Flush   string
	Table   tableid.TableID // of its last part
	Outcome api.Outcome
}

// SetRules makes list the quarantined rules of an iptables table. flush took those that are new;
// "" if no record waits for them. stands reports whether the table has a rule again.
func (s *State) SetRules(id tableid.TableID, list []reload.QuarantinedRule, by Cause, flush string, stands func(reload.QuarantinedRule) bool) {
	before := s.table(id).rules
	s.set(id, &table{rules: slices.Clone(list)}, by, flush, func(i int) bool { return stands(before[i]) })
}

// SetHeld is SetRules for a native table. It returns how many parts are new. Parts that time or
// packets remove are logged, but not kept, because they are not tried again.
func (s *State) SetHeld(id tableid.TableID, list []native.Held, by Cause, flush string, stands func(native.Held) bool) (fresh int) {
	before, next := s.table(id).held, &table{held: slices.Clone(list)}
	return s.set(id, next, by, flush, func(i int) bool { return stands(before[i]) })
}

// set replaces the list of a table. back reports whether a part of the old list stands.
func (s *State) set(id tableid.TableID, next *table, by Cause, flush string, back func(i int) bool) (fresh int) {
	old, c := s.table(id), change{id: id, by: by}
	was, is := old.parts(id), next.parts(id)
	known := map[any][]part{}
	for _, p := range was {
		known[p.key] = append(known[p.key], p)
	}
	for _, p := range is {
		if same := known[p.key]; len(same) > 0 {
			*p.flush, *p.ends, known[p.key] = *same[0].flush, *same[0].ends, same[1:]
			continue
		}
		*p.flush = cmp.Or(*p.flush, flush)
		c.fresh = append(c.fresh, p)
	}
	over := map[string]api.Outcome{}
	for i, p := range was {
		if len(known[p.key]) == 0 {
			continue
		}
		known[p.key] = known[p.key][1:]
		end := map[Cause]api.Outcome{Operator: api.Dismissed, GivenUp: reload.Partial}[by]
		switch {
		case end == "" && back(i):
			c.back++
			end = reload.Proved
		case end == "":
			end = api.OwnersDecision
		}
		c.left = append(c.left, p)
		over[*p.flush] = worse(worse(api.Outcome(*p.ends), end), over[*p.flush])
	}
	next.held = slices.DeleteFunc(next.held, func(h native.Held) bool { return h.Fleeting })
	s.keep(id, next, old, by, len(c.left))
	c.remain = len(next.rules) + len(next.held)
	for _, flush := range slices.Sorted(maps.Keys(over)) {
		if flush != "" && !s.End(flush, over[flush]) {
			s.ended = append(s.ended, Ended{flush, id, over[flush]})
		}
	}
	if by != Recall && len(c.fresh)+len(c.left) > 0 {
		s.said = append(s.said, c)
	}
	return len(c.fresh)
}

// keep replaces a table, and plans when its parts are tried: soon if there are more, and after a
// pause if its owner has written it and may go on.
func (s *State) keep(id tableid.TableID, next, old *table, by Cause, left int) {
	n, now := len(next.rules)+len(next.held), time.Now()
	switch next.retry = old.retry; {
	case n == 0:
		delete(s.tables, id)
		return
	case n > len(old.rules)+len(old.held):
		next.retry.In(pace.FirstTry, now)
	case by == Owner && (left > 0 || next.retry.At.IsZero()):
		next.retry.In(OwnersPause, now)
	}
	if s.tables == nil {
		s.tables = map[tableid.TableID]*table{}
	}
	s.tables[id] = next
}

// End notes how the record of a flush ends at best. It returns false if the flush has no part in
// quarantine.
func (s *State) End(flush string, outcome api.Outcome) (has bool) {
	for id, t := range s.tables {
		for _, p := range t.parts(id) {
			if *p.flush == flush {
				*p.ends, has = string(worse(api.Outcome(*p.ends), outcome)), true
			}
		}
	}
	return has
}

// Lacks reports whether a part is in quarantine that the flush took. Then its record is partial.
func (s *State) Lacks(flush string) bool { return s.End(flush, "") }

// Flushes returns the flushes that took the parts of a table.
func (s *State) Flushes(id tableid.TableID) (list []string) {
	for _, p := range s.table(id).parts(id) {
		if *p.flush != "" && !slices.Contains(list, *p.flush) {
			list = append(list, *p.flush)
		}
	}
	return list
}

// Dismiss accepts the loss of the parts that cannot be put back, and returns how many these are, and
// the rules of iptables' tables among them. Parts that wait for them are tried at once; waiting is
// how many these are.
func (s *State) Dismiss(now time.Time) (lost, waiting int, dismissed reload.Quarantine) {
	dismissed, left := s.Rules().Split()
	for id, t := range s.tables {
		n := t.count()
		s.set(id, &table{rules: left[id], held: slices.DeleteFunc(slices.Clone(t.held), func(h native.Held) bool { return !h.Waits })}, Operator, "", nil)
		still := s.table(id).count()
		lost, waiting = lost+n-still, waiting+still
		if still < n {
			s.Hurry(id, now)
		}
	}
	return lost, waiting, dismissed
}

// Hurry makes the parts of a table due.
func (s *State) Hurry(id tableid.TableID, now time.Time) { s.table(id).retry.In(0, now) }

// Suspend ends the tries of a table's parts, because the table is left out. The next change by its
// owner plans them again.
func (s *State) Suspend(id tableid.TableID) { s.table(id).retry = pace.Retry{} }

// Saw plans a try of rules at once if a chain that they lacked is back. A chain that the last read
// already saw is no reason.
func (s *State) Saw(snapshot iptables.Snapshot, now time.Time) {
	there := s.Rules().Standing(snapshot)
	for name, t := range tableid.Of(s.tables, snapshot.Family) {
		stood := map[string]bool{}
		for _, h := range t.rules {
			if there[iptables.Place{Table: name, Chain: h.MissingChain}] {
				stood[h.MissingChain] = true
			}
		}
		for chain := range stood {
			if !t.stood[chain] {
				t.retry.At = pace.Earliest(t.retry.At, now)
			}
		}
		t.stood = stood
	}
}

// At returns when parts are tried next, of the kinds of table that may be written now; zero:
// never.
func (s *State) At(iptables, native bool) (at time.Time) {
	for _, t := range s.tables {
		if iptables && len(t.rules) > 0 || native && len(t.held) > 0 {
			at = pace.Earliest(at, t.retry.At)
		}
	}
	return at
}

// Due returns the tables whose parts are tried now, in their order, and plans the next try of each.
func (s *State) Due(iptables, native bool, now time.Time) (list []tableid.TableID) {
	for _, id := range s.ids() {
		if t := s.tables[id]; pace.Due(t.retry.At, now) && (iptables && len(t.rules) > 0 || native && len(t.held) > 0) {
			t.retry.Failed(nil, now)
			list = append(list, id)
		}
	}
	return list
}

// Again plans a try of a table's parts in a moment, because another process wrote during the last
// one.
func (s *State) Again(id tableid.TableID, now time.Time) { s.table(id).retry.In(pace.FirstTry, now) }

// Rules returns the quarantined rules of iptables' tables.
func (s *State) Rules() reload.Quarantine {
	q := reload.Quarantine{}
	for id, t := range s.tables {
		if len(t.rules) > 0 {
			q[id] = t.rules
		}
	}
	return q
}

// Held returns the parts in quarantine of a native table.
func (s *State) Held(id tableid.TableID) []native.Held { return s.table(id).held }

// Count returns how many parts of a table are in quarantine.
func (s *State) Count(id tableid.TableID) int { return s.table(id).count() }

func (t *table) count() int { return len(t.rules) + len(t.held) }

// table returns the parts of a table; none if it has none.
func (s *State) table(id tableid.TableID) *table {
	if t := s.tables[id]; t != nil {
		return t
	}
	return &table{}
}

// ids returns the tables with parts in quarantine, in their order.
func (s *State) ids() []tableid.TableID {
	return slices.SortedFunc(maps.Keys(s.tables), tableid.TableID.Compare)
}
