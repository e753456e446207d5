package iptables

import (
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// cacheLife is how long the rules of an emptied table are kept: longer than any flush that its
// owner or canaryd answers.
const cacheLife = 10 * time.Minute

// A readCache stores the last read tables. The next read then returns the same slice for a chain
// with the same text. That costs no memory, and callers can compare the two by address. A table
// that lost more than half of its rules does not replace its predecessor for cacheLife: it was
// flushed, and the rules come back.
//
// Its methods may be called concurrently. Its tables are never changed.
type readCache struct {
	mu     sync.Mutex
	tables map[cachePlace]cachedTable
}

type cachePlace struct {
	family rules.Family
	table  rules.TableName
}

type cachedTable struct {
	table *rules.Table
	rules int
	put   time.Time
}

func newReadCache() *readCache { return &readCache{tables: map[cachePlace]cachedTable{}} }

// known returns a function that returns a table as it was read before, or nil. lexicon.show
// takes unchanged chains from that table.
func (s *readCache) known(family rules.Family) func(rules.TableName) *rules.Table {
	return func(table rules.TableName) *rules.Table {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.tables[cachePlace{family, table}].table
	}
}

// chain returns a chain as it was read before, or nil.
func (s *readCache) chain(family rules.Family, p Place) *rules.Chain {
	return s.known(family)(p.Table).Chain(p.Chain)
}

// drop forgets a family's tables, which may hold chains that are left out by now. A read calls
// it after budget.Shed, to free their memory.
func (s *readCache) drop(family rules.Family) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range rules.AllTables() {
		delete(s.tables, cachePlace{family, name})
	}
}

// put stores the tables of a read, for the next read to share memory with. A table that lost
// more than half of its rules, even all, leaves its predecessor in the cache for cacheLife.
func (s *readCache) put(family rules.Family, set rules.Ruleset, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range rules.AllTables() {
		at := cachePlace{family, name}
		before, count := s.tables[at], set[name].RuleCount()
		switch {
		case 2*count < before.rules && now.Sub(before.put) <= cacheLife:
		case set[name] == nil:
			delete(s.tables, at)
		default:
			s.tables[at] = cachedTable{set[name], count, now}
		}
	}
}
