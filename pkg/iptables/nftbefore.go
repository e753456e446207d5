package iptables

import (
	"maps"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A lastMoment stores a family's states from right before commits of other processes that may be
// parts of a flush.
type lastMoment struct {
	mu     sync.Mutex
	tables map[rules.TableName][]momentBefore // in the order of the commits
	named  uint64                             // the lexicon's numbers at the last read
}

// A momentBefore is a family's state before a commit that took something from a table.
type momentBefore struct {
	Snapshot
	marks bool // the commit took marks
}

// momentsKept bounds the states of one table. A script that flushes chain by chain takes marks
// with some commits; an owner may write between any two of them.
const momentsKept = 8

// keep stores shown, the family's state right before a commit of another process that deleted
// rules from the table. With marks, the commit deleted marks or the whole table: then shown stays
// until take returns it, because later states may be half flushed. Another state gives way to the
// next one, and so does the last of momentsKept. Taking calls keep. The daemon takes the states by
// Kernel.Before, to learn rules that owners wrote right before a flush.
func (m *lastMoment) keep(table rules.TableName, shown Snapshot, marks bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tables == nil {
		m.tables = map[rules.TableName][]momentBefore{}
	}
	kept := m.tables[table]
	if n := len(kept); n == momentsKept || n > 0 && !kept[n-1].marks {
		kept = kept[:n-1]
	}
	m.tables[table] = append(kept, momentBefore{shown, marks})
}

// take returns the states before commits up to a digest, for Kernel.Before. It returns each
// once: the state is then forgotten.
func (m *lastMoment) take(upTo uint64) map[rules.TableName][]Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all map[rules.TableName][]Snapshot
	for name, kept := range m.tables {
		n := 0
		for ; n < len(kept) && kept[n].Older(upTo); n++ {
			if all == nil {
				all = map[rules.TableName][]Snapshot{}
			}
			all[name] = append(all[name], kept[n].Snapshot)
		}
		if m.tables[name] = slices.Clone(kept[n:]); n == len(kept) {
			delete(m.tables, name)
		}
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

// Before returns, by table and in their order, the family's states right before commits of other
// processes that may have flushed a part of that table. These are all commits that took marks, up
// to a bound, and the last one. It has only states that the mirror knew without another read.
// States behind the first commit that took marks may be half flushed. Before ignores commits that
// a read with that digest does not show. Each state is returned once. On legacy there are none.
func (k *Kernel) Before(family rules.Family, digest uint64) map[rules.TableName][]Snapshot {
	if k.mirror == nil || k.mirror.families[family] == nil {
		return nil
	}
	return k.mirror.families[family].before.take(digest)
}

// numbers counts the rules that named an ipset by its number when they were read.
func (l *lexicon) numbers() uint64 { return l.named.Load() }

// Older reports whether a Snapshot of nf_tables shows an older state than the digest's.
func (s Snapshot) Older(digest uint64) bool { return nft.Newer(uint32(digest), uint32(s.Digest)) }
