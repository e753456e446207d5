package iptables

import (
	"maps"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A lastMoment stores a family's state from right before commits of other processes that may be
// parts of a flush.
type lastMoment struct {
	mu     sync.Mutex
	tables map[rules.TableName]momentBefore
	named  uint64 // the lexicon's numbers at the last read
}

// A momentBefore is a family's state before a commit that took something from a table.
type momentBefore struct {
	Snapshot
	// marks reports that the commit took marks. No later state replaces this one until take
	// returns it, because the later state may be half flushed.
	marks bool
}

// keep stores shown, the family's state right before a commit of another process that deleted
// rules from the table. With marks, the commit deleted marks or the whole table, and no later
// state replaces shown. Taking calls it. The daemon takes the state by Kernel.Before, to
// learn rules that owners wrote right before a flush.
func (m *lastMoment) keep(table rules.TableName, shown Snapshot, marks bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tables[table].marks {
		return
	}
	if m.tables == nil {
		m.tables = map[rules.TableName]momentBefore{}
	}
	m.tables[table] = momentBefore{shown, marks}
}

// take returns the states before commits up to a digest, for Kernel.Before. It returns each
// once: the state is then forgotten, and keep may store another.
func (m *lastMoment) take(upTo uint64) map[rules.TableName]Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all map[rules.TableName]Snapshot
	for name, before := range m.tables {
		if !before.Older(upTo) {
			continue
		}
		if all == nil {
			all = map[rules.TableName]Snapshot{}
		}
		all[name] = before.Snapshot
		delete(m.tables, name)
	}
	return all
}

// Taking implements nft.MirrorView. It stores the state before a commit that may be a part of a
// flush. After missed notifications, any of the tables may have lost marks.
func (f *familyText) Taking(genid uint32, tables []string, missed bool) {
	marks := f.taken.mayFlush(f.family, func(p Place) int {
		if c := f.raw.Chain(p); c != nil {
			return len(c.IDs)
		}
		return 0
	})
	if missed { // then the taken rules are unknown
		for _, name := range tables {
			marks[name] = true
		}
	}
	maps.DeleteFunc(marks, func(name rules.TableName, _ bool) bool { return !slices.Contains(tables, name) })
	// The name behind an ipset's number in a rule is certain only while the rule is in the
	// table.
	if len(marks) == 0 || f.before.named != f.lexicon.numbers() {
		return
	}
	shown := f.snapshot(uint64(genid))
	for name, took := range marks {
		f.before.keep(name, shown, took)
	}
}

// Before returns, by table, the family's state right before the last commit of another process
// that may have flushed a part of that table. It has only states that the mirror knew without
// another read. Once a commit took marks of the table, it is the state before that commit. It
// ignores commits that a read with that digest does not show. Each state is returned once. On
// legacy there are none.
func (k *Kernel) Before(family rules.Family, digest uint64) map[rules.TableName]Snapshot {
	if k.mirror == nil || k.mirror.families[family] == nil {
		return nil
	}
	return k.mirror.families[family].before.take(digest)
}

// numbers counts the rules that named an ipset by its number when they were read.
func (l *lexicon) numbers() uint64 { return l.named.Load() }

// Older reports whether a Snapshot of nf_tables shows an older state than the digest's.
func (s Snapshot) Older(digest uint64) bool { return nft.Newer(uint32(digest), uint32(s.Digest)) }
