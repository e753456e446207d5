package iptables

import (
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// shelfLife is how long the rules of a table that was emptied are kept: longer
// than any flush lasts that its owner or canaryd answers.
const shelfLife = 10 * time.Minute

// A shelf keeps the tables that were read last, so that the next read hands
// out a chain whose text is the same as the very same slice: it costs no
// memory, and the two are compared by their addresses. A table that lost more
// than half of its rules does not take the place of the one before for
// shelfLife: it was flushed, and they come back.
//
// Its methods may be called concurrently. What is on it is never changed.
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

// known returns a table as it was read before, or nil, for rules.ParseSome.
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
