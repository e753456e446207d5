package iptables

import (
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// shelfLife is how long the rules of an emptied table are kept: longer than any flush that its
// owner or canaryd answers.
const shelfLife = 10 * time.Minute

// A shelf stores the last read tables. The next read then returns the same slice for a chain
// with the same text. That costs no memory, and callers can compare the two by address. A table
// that lost more than half of its rules does not replace its predecessor for shelfLife: it was
// flushed, and the rules come back.
//
// Its methods may be called concurrently. Its tables are never changed.
type shelf struct {
	mu     sync.Mutex
	tables map[shelfPlace]shelved
}

type shelfPlace struct {
	family rules.Family
	table  rules.TableName
}

type shelved struct {
	table *rules.Table
	rules int
	put   time.Time
}

func newShelf() *shelf { return &shelf{tables: map[shelfPlace]shelved{}} }

// known returns a function for rules.ParseSome that returns a table as it was read before, or
// nil.
func (s *shelf) known(family rules.Family) func(rules.TableName) *rules.Table {
	return func(table rules.TableName) *rules.Table {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.tables[shelfPlace{family, table}].table
	}
}

// chain returns a chain as it was read before, or nil.
func (s *shelf) chain(family rules.Family, p Place) *rules.Chain {
	return s.known(family)(p.Table).Chain(p.Chain)
}

// drop forgets a family's tables, which may hold chains that are left out by now.
func (s *shelf) drop(family rules.Family) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range rules.AllTables() {
		delete(s.tables, shelfPlace{family, name})
	}
}

func (s *shelf) put(family rules.Family, set rules.Ruleset, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range rules.AllTables() {
		at := shelfPlace{family, name}
		before, count := s.tables[at], set[name].RuleCount()
		switch {
		case 2*count < before.rules && now.Sub(before.put) <= shelfLife:
		case set[name] == nil:
			delete(s.tables, at)
		default:
			s.tables[at] = shelved{set[name], count, now}
		}
	}
}
