// Package quarantine keeps the parts of tables that could not be put back yet. It knows when they
// are tried again, and which flush records end with them.
//
// A part is a rule of an iptables table, or a part of a native table. The loop passes the new list
// of a table to [State.Set], and tries the table that [State.Next] returns. [State.Status] lists
// the parts. No function fails. A State belongs to the loop's goroutine; its lists are values.
package quarantine

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// OwnersPause is how long an owner that writes parts one by one may pause between two of them.
const OwnersPause = 2 * time.Second

// A Cause is the reason why the list of a table changes.
type Cause int

// The causes.
const (
	Replay   Cause = iota // canaryd has written the table
	Owner                 // its owner has written the table: parts that left are back, or not wanted
	Operator              // an operator accepts that parts are lost
	GivenUp               // canaryd cannot know whether its owner wants the parts
	Recall                // the last run left the parts
)

// A State has the parts in quarantine of all tables. The zero State has none.
type State struct{ tables map[tableid.TableID]*table }

// A table has the parts of one table, of one kind.
type table struct {
	rules []reload.QuarantinedRule
	held  []native.Held
	retry pace.Retry      // zero: they are not tried, because the table is left out
	stood map[string]bool // the missing chains of rules that the last read saw
}

// A part is a rule or a part of a native table: its words, and the flush that took it.
type part struct {
	api.Quarantined
	key   any // equal for the same part of a table
	next  string
	flush *string
}

// parts returns the parts of a table. Only here the kinds of table differ.
func (t *table) parts(id tableid.TableID) (list []part) {
	type key struct{ chain, part any }
	for i := range t.rules {
		h := &t.rules[i]
		list = append(list, part{api.QuarantinedOf(id, *h), key{h.Chain, h.Rule.Key()}, "it is tried again", &h.Flush})
		if _, opaque := h.Rule.Opaque(); opaque && !h.Refused {
			list[i].next = "its owner has to put it back"
		}
	}
	for i := range t.held {
		h := &t.held[i]
		list = append(list, part{api.HeldOf(id, *h), key{h.Name, h.Text}, "it is tried again", &h.Flush})
		if h.Fleeting {
			list[i].next = "its time is running out, and it is not tried again"
		}
	}
	return list
}

// Set makes rules or held, by the kind of table, the parts of a table. flush took those that are
// new; fresh is how many these are. ended are the flushes whose last part has left, or whose parts
// an operator or canaryd has given up. Parts that time or packets remove are logged, but not kept.
func (s *State) Set(ctx context.Context, id tableid.TableID, rules []reload.QuarantinedRule, held []native.Held, by Cause, flush string) (fresh int, ended []string) {
	old, next := s.table(id), &table{rules: slices.Clone(rules), held: slices.Clone(held)}
	was, known, still := old.parts(id), map[any]string{}, map[any]bool{}
	var added, left []part
	for _, p := range was {
		known[p.key] = *p.flush
	}
	for _, p := range next.parts(id) {
		still[p.key] = true
		if of, is := known[p.key]; is {
			*p.flush = of
		} else {
			*p.flush = cmp.Or(*p.flush, flush)
			added = append(added, p)
		}
	}
	next.held = slices.DeleteFunc(next.held, func(h native.Held) bool { return h.Fleeting })
	n, before, now := next.count(), len(was), time.Now()
	switch next.retry = old.retry; {
	case n > before:
		next.retry.In(pace.FirstTry, now)
	case by == Owner && (n < before || next.retry.At.IsZero()): // it may be about to write the others
		next.retry.In(OwnersPause, now)
	}
	if s.tables = tableid.With(s.tables, id, next); n == 0 {
		delete(s.tables, id)
	}
	for _, p := range was {
		if still[p.key] {
			continue
		}
		left = append(left, p)
		of := *p.flush
		if by == Operator || by == GivenUp {
			for _, rest := range s.of(of) {
				*rest.flush = ""
			}
		}
		if of != "" && !s.Lacks(of) && !slices.Contains(ended, of) {
			ended = append(ended, of)
		}
	}
	if by != Recall && (len(added) > 0 || before > n) {
		say(klog.FromContext(ctx).WithValues("table", slices.Concat(added, was)[0].TableName()), by, added, left, before-n, n)
	}
	return len(added), ended
}

// say logs how the list of a table has changed. It names the first parts, and counts the others.
func say(log klog.Logger, by Cause, added, left []part, fewer, n int) {
	missing, waiting := split(added)
	for _, p := range missing[:min(flushes.NamesKept, len(missing))] {
		severity.Errors(log).Info("A part of a table is in quarantine: it could not be put back", "part", p.Part(), "reason", p.Reason, "next", p.next)
	}
	if more := len(missing) - flushes.NamesKept; more > 0 {
		severity.Errors(log).Info("More parts of a table are in quarantine", "parts", more)
	}
	chains := api.WaitingChains(waiting)
	for _, w := range chains[:min(flushes.NamesKept, len(chains))] {
		severity.Errors(log).Info("Rules of a chain wait, because missing rules decide which packets reach them", "chain", w.Chain, "rules", w.Rules,
			"reason", w.Reason, "next", "they are put back in their places when those are back")
	}
	switch log := severity.Notices(log); {
	case by == Operator:
		for _, p := range left[:min(flushes.NamesKept, len(left))] {
			log.Info("An operator has accepted that a part of a table in quarantine is lost", "part", p.Part(), "reason", p.Reason)
		}
	case by == Owner && fewer > 0:
		log.Info("Parts of a table left the quarantine: a write put them or others in their place, or removed them", "parts", fewer, "left", n)
	case by == Replay && fewer > 0:
		log.Info("Parts of a table were put back from quarantine", "parts", fewer, "left", n)
	}
}

// of returns the parts that a flush took.
func (s *State) of(flush string) (list []part) {
	for id, t := range s.tables {
		list = append(list, slices.DeleteFunc(t.parts(id), func(p part) bool { return *p.flush != flush })...)
	}
	return list
}

// Lacks reports whether a part is in quarantine that the flush took. Then its record is partial.
func (s *State) Lacks(flush string) bool { return len(s.of(flush)) > 0 }

// Flushes returns the flushes that took the parts of a table.
func (s *State) Flushes(id tableid.TableID) []string {
	list := map[string]bool{}
	for _, p := range s.table(id).parts(id) {
		list[*p.flush] = true
	}
	delete(list, "")
	return slices.Sorted(maps.Keys(list))
}

// Plan makes the parts of a table due then. Zero means not before its owner writes it: the table is
// left out.
func (s *State) Plan(id tableid.TableID, at time.Time) { s.table(id).retry = pace.Retry{At: at} }

// Next returns the table that is tried next, and when. may reports whether tables of a kind may be
// written. Zero means never.
func (s *State) Next(may func(native bool) bool) (next tableid.TableID, at time.Time) {
	for _, id := range s.Tables() {
		t := s.tables[id]
		if first := pace.Earliest(at, t.retry.At); first != at && may(t.held != nil) {
			next, at = id, first
		}
	}
	return next, at
}

// Tried plans the next try of a table, after one that has begun now.
func (s *State) Tried(id tableid.TableID, now time.Time) { s.table(id).retry.Failed(nil, now) }

// Saw makes rules due if a chain that they lacked is back. A chain that the last read already saw
// is no reason.
func (s *State) Saw(snapshot iptables.Snapshot, now time.Time) {
	there := s.Rules().Standing(snapshot)
	for name, t := range tableid.Of(s.tables, snapshot.Family) {
		before := t.stood
		t.stood = map[string]bool{}
		for place := range there {
			if t.stood[place.Chain] = place.Table == name; place.Table == name && !before[place.Chain] {
				t.retry.At = pace.Earliest(t.retry.At, now)
			}
		}
	}
}

// Status puts the parts of all tables into a status. Parts that wait are last in the list, so that
// they hide no part that they wait for.
func (s *State) Status(to *api.Status) {
	var all []part
	for _, id := range s.Tables() {
		all = append(all, s.tables[id].parts(id)...)
	}
	missing, waiting := split(all)
	var list []api.Quarantined
	for _, p := range missing {
		list = append(list, p.Quarantined)
	}
	to.ShowQuarantined(append(list, waiting...))
}

// split returns the parts that cannot be put back, and the parts that wait for them.
func split(list []part) (missing []part, waiting []api.Quarantined) {
	for _, p := range list {
		if p.Waits {
			waiting = append(waiting, p.Quarantined)
		} else {
			missing = append(missing, p)
		}
	}
	return missing, waiting
}

// Rules returns the quarantined rules of iptables' tables.
func (s *State) Rules() reload.Quarantine {
	q := reload.Quarantine{}
	for id, t := range s.tables {
		if t.rules != nil {
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
func (s *State) table(id tableid.TableID) *table { return cmp.Or(s.tables[id], &table{}) }

// Tables returns the tables with parts in quarantine, in their order.
func (s *State) Tables() []tableid.TableID {
	return slices.SortedFunc(maps.Keys(s.tables), tableid.TableID.Compare)
}
