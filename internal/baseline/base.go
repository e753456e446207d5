package baseline

import (
	"hash/maphash"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Base is the content that an operator confirmed. Later content is compared with it. It holds
// digests of the rules instead of their text: 62,590 rules take 3 MB. It is for one goroutine at
// a time.
type Base struct {
	seed   maphash.Seed // random, so that no other process can find two rules with one digest
	tables map[table]map[part]*confirmed
	turn   int // how often since was called
}

// A table is one of iptables' tables, or a native table.
type table struct {
	tableid.TableID
	native bool
}

// A part is the rules of a chain, or one declaration of a native table: see native.Entry.
type part struct{ kind, name string }

// wholeTable is the kind of a change that stands for a whole native table.
const wholeTable = "table"

// A confirmed is one part of a Base, and the result of its last comparison.
type confirmed struct {
	prints []print
	turn   int // the last turn in which the content had the part
	of     memory
	diff   *difference // nil: none
}

// A print identifies a rule by a digest of its text, which is quick, and a digest of its
// meaning. Both are the same for a rule of a native table, which is its bytes.
type print struct{ text, meaning uint64 }

// A difference is the difference between a part and its prints. appeared has the places of rules.
type difference struct {
	appeared []int
	gone     int
	// reordered says that confirmed rules have another order in the chain.
	reordered bool
}

// A change is the difference between one part of the content and a Base.
type change struct {
	table
	part
	difference
	known bool // the Base has the part
	base  bool // packets enter the chain at a hook
	list  list // nil: the part is gone
	rules int  // of a whole table
}

// A Content is everything that ought to be in force.
type Content struct {
	Generation rules.Generation
	// Native are the native tables. A table without a value exists, and its content is not known.
	Native map[tableid.TableID]*native.Table
	// Unread: no native table is known yet.
	Unread bool
}

// newBase returns the Base of a stored baseline. It takes 0.2 s for 62,590 rules.
func newBase(stored reload.Baseline) *Base {
	b := &Base{seed: maphash.MakeSeed(), tables: map[table]map[part]*confirmed{}}
	for id, s := range stored.Generation {
		parts := make(map[part]*confirmed, len(s.Chains))
		s.EachChain(id.Name, func(name string, of []rules.Rule) {
			prints := make([]print, len(of))
			for i := range of {
				l := chainRules{rules: of}
				prints[i] = print{l.text(b.seed, i), l.meaning(b.seed, i)}
			}
			parts[part{"", strings.Clone(name)}] = &confirmed{prints: prints}
		})
		b.tables[table{id, false}] = parts
	}
	for _, t := range stored.Native {
		parts := make(map[part]*confirmed, len(t.Parts))
		for _, p := range t.Parts {
			c := &confirmed{}
			for digest := range slices.Chunk(p.Digests, reload.BaselineDigest) {
				d := maphash.Bytes(b.seed, digest)
				c.prints = append(c.prints, print{d, d})
			}
			parts[part{p.Kind, p.Name}] = c
		}
		b.tables[table{t.Family.Table(t.Table), true}] = parts
	}
	return b
}

// since returns the parts in which content differs from the Base. In each table it lists
// built-in chains first and missing parts last. A native table that the Base lacks is one
// change, and so is one that is gone. A part that is the same memory as in the last call costs
// next to nothing: at 5,000 services one call takes 2 ms.
func (b *Base) since(now Content) []change {
	var all []change
	b.turn++
	for _, f := range rules.Families() {
		for _, name := range rules.AllTables() {
			t := table{f.Table(name), false}
			now.Generation[t.TableID].EachChain(name, func(chain string, of []rules.Rule) {
				all = b.take(all, change{table: t, part: part{"", chain}, base: rules.Builtin(name, chain), list: chainRules{chain, of}})
			})
			all = append(all, b.gone(t)...)
		}
	}
	if now.Unread {
		return all
	}
	for _, t := range b.natives(now.Native) {
		content, exists := now.Native[t.TableID]
		switch {
		case !exists:
			all = append(all, change{table: t, part: part{wholeTable, ""}, known: true, rules: b.rules(t)})
		case content == nil:
		case b.tables[t] == nil:
			_, n, _ := content.Counts()
			all = append(all, change{table: t, part: part{wholeTable, ""}, rules: n})
		default:
			for e := range native.NewListing(content).All() {
				all = b.take(all, change{table: t, part: part{e.Kind, e.Name}, base: e.Base, list: entry{e}})
			}
			all = append(all, b.gone(t)...)
		}
	}
	return all
}

// natives returns the native tables of the Base and of the content, each once and in order.
func (b *Base) natives(now map[tableid.TableID]*native.Table) (all []table) {
	for id := range now {
		all = append(all, table{id, true})
	}
	for t := range b.tables {
		if _, exists := now[t.TableID]; t.native && !exists {
			all = append(all, t)
		}
	}
	sorting.Stable(all, func(a, b table) int { return a.Compare(b.TableID) })
	return all
}

// take compares a part for since, and appends its change if there is any.
func (b *Base) take(all []change, c change) []change {
	is := b.tables[c.table][c.part]
	if is != nil {
		is.turn = b.turn
	}
	if d := b.differs(is, c.list, true); d != nil {
		c.known, c.difference = is != nil, *d
		all = append(all, c)
	}
	return all
}

// differs returns the difference between a list and a confirmed part; nil if there is none. keep:
// it remembers the result, for this memory.
func (b *Base) differs(is *confirmed, l list, keep bool) *difference {
	n := l.len()
	if is == nil {
		if n == 0 {
			return nil
		}
		all := make([]int, n)
		for i := range all {
			all[i] = i
		}
		return &difference{appeared: all}
	}
	if m := l.memory(); n == 0 || m != is.of {
		d := b.compare(is.prints, l)
		if !keep {
			return d
		}
		is.of, is.diff = m, d
	}
	return is.diff
}

// gone returns the parts of a table of the Base that the content did not have in this turn, for
// since.
func (b *Base) gone(t table) []change {
	var all []change
	for p, c := range b.tables[t] {
		if c.turn == b.turn {
			continue
		}
		c.of, c.diff = memory{}, nil
		if len(c.prints) > 0 {
			all = append(all, change{table: t, part: p, known: true, difference: difference{gone: len(c.prints)}})
		}
	}
	sorting.Stable(all, func(a, b change) int { return strings.Compare(a.name, b.name) })
	return all
}

// rules counts the rules that the Base has of a table.
func (b *Base) rules(t table) (n int) {
	for p, c := range b.tables[t] {
		if p.kind == "" {
			n += len(c.prints)
		}
	}
	return n
}

// Lacks returns the rules of list that the Base does not have in that chain of iptables. The
// flush record and a restore name them as not confirmed. Without a Base there are none.
func (b *Base) Lacks(id tableid.TableID, chain string, of []rules.Rule) (lacking []rules.Rule) {
	if b == nil {
		return nil
	}
	if d := b.differs(b.tables[table{id, false}][part{"", chain}], chainRules{chain, of}, false); d != nil {
		for _, i := range d.appeared {
			lacking = append(lacking, of[i])
		}
	}
	return lacking
}

// compare returns the differences between a list and prints, for differs. It returns nil if they
// are the same in the same order. It computes meanings only of rules whose text differs, because
// most rules of a changed chain have not changed.
func (b *Base) compare(prints []print, l list) *difference {
	n, same := l.len(), 0
	for same < min(n, len(prints)) && l.text(b.seed, same) == prints[same].text {
		same++
	}
	if same == n && same == len(prints) {
		return nil
	}
	m := matching{prints: prints[same:], at: make([]int, n-same)}
	m.match(func(p print) uint64 { return p.text }, func(i int) uint64 { return l.text(b.seed, same+i) })
	if of, spelled := l.(chainRules); spelled {
		m.match(func(p print) uint64 { return p.meaning }, func(i int) uint64 { return of.meaning(b.seed, same+i) })
	}
	d := difference{gone: len(m.prints)}
	last := 0
	for i, at := range m.at {
		if at == 0 {
			d.appeared = append(d.appeared, same+i)
			continue
		}
		d.gone--
		d.reordered = d.reordered || at < last
		last = at
	}
	if len(d.appeared) == 0 && d.gone == 0 && !d.reordered {
		return nil
	}
	return &d
}

// A matching pairs rules with prints: at[i] is the place of rule i's print, counted from 1, or 0.
type matching struct {
	prints []print
	at     []int
	taken  map[int]bool
}

// match pairs the rules that have no print yet, for compare. of and digest take the digest
// of a print and a rule: of the text, or of the meaning. Of several equal prints it uses the
// first.
func (m *matching) match(of func(print) uint64, digest func(i int) uint64) {
	if len(m.taken) == len(m.prints) || len(m.at) == 0 {
		return
	}
	places := map[uint64][]int{}
	for i, p := range m.prints {
		if !m.taken[i] {
			places[of(p)] = append(places[of(p)], i)
		}
	}
	if m.taken == nil {
		m.taken = map[int]bool{}
	}
	for i := range m.at {
		if m.at[i] != 0 {
			continue
		}
		d := digest(i)
		if free := places[d]; len(free) > 0 {
			m.at[i], m.taken[free[0]], places[d] = free[0]+1, true, free[1:]
		}
	}
}

// A list is the rules of one chain, or one declaration, in the form in which they are compared.
type list interface {
	len() int
	memory() memory
	text(seed maphash.Seed, i int) uint64 // the digest of the text, or of the bytes
	words(i int) string                   // for people
}

// A memory tells lists apart without a look at their content. It keeps its beginning alive, so
// that no other list gets the same.
type memory struct {
	begin any
	len   int
}

// chainRules are the rules of one chain of iptables.
type chainRules struct {
	chain string
	rules []rules.Rule
}

func (l chainRules) len() int { return len(l.rules) }

func (l chainRules) memory() memory {
	if len(l.rules) == 0 {
		return memory{}
	}
	return memory{&l.rules[0], len(l.rules)}
}

func (l chainRules) text(seed maphash.Seed, i int) uint64 {
	return maphash.String(seed, l.rules[i].Spec)
}

func (l chainRules) meaning(seed maphash.Seed, i int) uint64 {
	return maphash.String(seed, l.rules[i].Meaning())
}

func (l chainRules) words(i int) string { return rules.Jump{Chain: l.chain, Rule: l.rules[i]}.String() }

// An entry is an entry of a native table.
type entry struct{ native.Entry }

func (e entry) len() int { return e.Len() }

func (e entry) memory() memory { return memory{e.Memory(), e.Len()} }

func (e entry) text(seed maphash.Seed, i int) uint64 {
	d := e.Digest(i)
	return maphash.Bytes(seed, d[:reload.BaselineDigest])
}

func (e entry) words(i int) string { return e.Text(i) }
