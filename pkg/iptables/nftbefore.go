package iptables

import (
	"maps"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A lastMoment is what is kept of a family from right before commits of other processes that may be
// parts of a flush.
type lastMoment struct {
	mu     sync.Mutex
	tables map[rules.TableName]momentBefore
	named  uint64 // the lexicon's numbers at the last read
}

// A momentBefore is a family as it stood before a commit that took something from a table.
type momentBefore struct {
	Snapshot
	// marks: it took marks. Until it is asked for, no later one takes its place: what stands after
	// that may be the half of a flush.
	marks bool
}

// keep keeps what stood before a commit that took something from a table.
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

// take returns what stood before commits up to a digest, once.
func (m *lastMoment) take(upTo uint64) map[rules.TableName]Snapshot {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all map[rules.TableName]Snapshot
	for name, before := range m.tables {
		if upTo == before.Digest || before.Later(upTo) {
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

// Taking implements nft.MirrorView: it keeps what stands before a commit that may be a part of a
// flush.
func (f *familyText) Taking(genid uint32, tables []string, missed bool) {
	marks := f.taken.mayFlush(f.family, func(p Place) int {
		if c := f.raw.Chain(p); c != nil {
			return len(c.IDs)
		}
		return 0
	})
	if missed { // it is not known what was taken
		for _, name := range tables {
			marks[name] = true
		}
	}
	maps.DeleteFunc(marks, func(name rules.TableName, _ bool) bool { return !slices.Contains(tables, name) })
	// The name of an ipset that a rule has by a number is certain only while the rule stands.
	if len(marks) == 0 || f.before.named != f.lexicon.numbers() {
		return
	}
	shown := f.snapshot(uint64(genid))
	for name, took := range marks {
		f.before.keep(name, shown, took)
	}
}

// Before returns, by table, a family as it stood right before the last commit of another process
// that may have flushed a part of that table, if no read was needed to know that. Once a commit
// took marks of the table, it is the state before that one. Only commits that a read with that
// digest shows are meant. Each is returned once. On legacy there are none.
func (k *Kernel) Before(family rules.Family, digest uint64) map[rules.TableName]Snapshot {
	if k.mirror == nil || k.mirror.families[family] == nil {
		return nil
	}
	return k.mirror.families[family].before.take(digest)
}

// numbers counts the rules that named an ipset by its number when they were met.
func (l *lexicon) numbers() uint64 { return l.named.Load() }

// Later reports whether a Snapshot of nf_tables shows a later state than that of another digest.
func (s Snapshot) Later(digest uint64) bool { return nft.Newer(uint32(s.Digest), uint32(digest)) }
