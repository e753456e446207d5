package rules

import (
	"hash/maphash"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A Baseline is a generation that an operator confirmed. Later generations are compared with
// it. It holds digests of the rules instead of their text: 62,590 rules take 3 MB. It is for
// one goroutine at a time.
type Baseline struct {
	seed   maphash.Seed // random, so that no other process can find two rules with one digest
	tables map[TableID]map[string]*confirmedChain
	turn   int // how often Since was called
}

// A confirmedChain is one chain of a Baseline, and the result of its last comparison.
type confirmedChain struct {
	prints []print
	turn   int // the last turn in which the generation had the chain
	// of holds the rules of the last comparison: the generation's own slice.
	of     []Rule
	change *ChainChange // nil: no difference
}

// A print identifies a rule by a digest of its text, which is quick, and a digest of its
// meaning.
type print struct{ text, meaning uint64 }

// A ChainChange is the difference between one chain and a Baseline.
type ChainChange struct {
	Family Family
	Table  TableName
	Chain  string
	// Known says that the baseline has the chain. For a built-in chain: that it has jumps
	// there.
	Known    bool
	Appeared []Rule // in their order
	Gone     int
	// Reordered says that rules of the baseline have another order in the chain.
	Reordered bool
}

// NewBaseline returns the baseline of a generation that the operator has confirmed. It takes
// 0.2 s for 62,590 rules.
func NewBaseline(g Generation) *Baseline {
	b := &Baseline{seed: maphash.MakeSeed(), tables: map[TableID]map[string]*confirmedChain{}}
	for id, s := range g {
		chains := make(map[string]*confirmedChain, len(s.Chains))
		s.eachChain(id.Name, func(name string, list []Rule) { chains[strings.Clone(name)] = &confirmedChain{prints: b.prints(list)} })
		b.tables[id] = chains
	}
	return b
}

// prints returns the digests of rules, of their text and of their meaning, by which compare
// recognizes them later.
func (b *Baseline) prints(list []Rule) []print {
	prints := make([]print, len(list))
	for i, r := range list {
		prints[i] = print{b.digest(r.Spec), b.digest(r.Meaning())}
	}
	return prints
}

func (b *Baseline) digest(text string) uint64 { return maphash.String(b.seed, text) }

// eachChain calls do for each built-in chain that has jumps, with these, and then for each
// protected chain. NewBaseline and Since call it.
func (s Section) eachChain(t TableName, do func(name string, list []Rule)) {
	for _, name := range s.JumpChains(t) {
		var list []Rule
		for _, h := range s.Jumps {
			if h.Chain == name {
				list = append(list, h.Rule)
			}
		}
		do(name, list)
	}
	for i := range s.Chains {
		do(s.Chains[i].Name, s.Chains[i].Rules)
	}
}

// Since returns the chains in which a generation differs from the baseline. In each table it
// lists built-in chains first and missing chains last. A chain that is the same memory as in
// the last call costs next to nothing: at 5,000 services one call takes 2 ms.
func (b *Baseline) Since(g Generation) []ChainChange {
	var all []ChainChange
	b.turn++
	for _, f := range Families() {
		for _, t := range AllTables() {
			chains := b.tables[f.Table(t)]
			g[f.Table(t)].eachChain(t, func(name string, list []Rule) {
				c := chains[name]
				if c == nil {
					if len(list) > 0 {
						all = append(all, ChainChange{Family: f, Table: t, Chain: name, Appeared: list})
					}
					return
				}
				c.turn = b.turn
				if !sameMemory(c.of, list) || len(list) == 0 {
					c.of, c.change = list, b.compare(c.prints, list)
				}
				if c.change != nil {
					change := *c.change
					change.Family, change.Table, change.Chain = f, t, name
					all = append(all, change)
				}
			})
			all = append(all, b.gone(f, t)...)
		}
	}
	return all
}

// gone returns the chains of the baseline that the table did not have in this turn, for
// Since.
func (b *Baseline) gone(f Family, t TableName) []ChainChange {
	var all []ChainChange
	for name, c := range b.tables[f.Table(t)] {
		if c.turn == b.turn {
			continue
		}
		c.of, c.change = nil, nil
		if len(c.prints) > 0 {
			all = append(all, ChainChange{Family: f, Table: t, Chain: name, Known: true, Gone: len(c.prints)})
		}
	}
	sorting.Stable(all, func(a, b ChainChange) int { return strings.Compare(a.Chain, b.Chain) })
	return all
}

// Lacks returns the rules of list that the baseline does not have in that chain. The flush
// record and a restore name them as not confirmed.
func (b *Baseline) Lacks(f Family, t TableName, chain string, list []Rule) []Rule {
	c := b.tables[f.Table(t)][chain]
	switch {
	case len(list) == 0:
		return nil
	case c == nil:
		return list
	}
	change := c.change
	if !sameMemory(c.of, list) {
		change = b.compare(c.prints, list)
	}
	if change == nil {
		return nil
	}
	return change.Appeared
}

// compare returns the differences between the rules of a chain and prints, for Since and
// Lacks. It returns nil if they are the same in the same order. It computes meanings only of
// rules whose text differs, because most rules of a changed chain have not changed.
func (b *Baseline) compare(prints []print, list []Rule) *ChainChange {
	same := 0
	for same < len(list) && same < len(prints) && b.digest(list[same].Spec) == prints[same].text {
		same++
	}
	if same == len(list) && same == len(prints) {
		return nil
	}
	m := matching{prints: prints[same:], at: make([]int, len(list)-same)}
	list = list[same:]
	m.match(list, func(p print) uint64 { return p.text }, func(r Rule) uint64 { return b.digest(r.Spec) })
	m.match(list, func(p print) uint64 { return p.meaning }, func(r Rule) uint64 { return b.digest(r.Meaning()) })
	change := ChainChange{Known: true, Gone: len(m.prints)}
	last := 0
	for i, at := range m.at {
		if at == 0 {
			change.Appeared = append(change.Appeared, list[i])
			continue
		}
		change.Gone--
		change.Reordered = change.Reordered || at < last
		last = at
	}
	if len(change.Appeared) == 0 && change.Gone == 0 && !change.Reordered {
		return nil
	}
	return &change
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
func (m *matching) match(list []Rule, of func(print) uint64, digest func(Rule) uint64) {
	if len(m.taken) == len(m.prints) || len(list) == 0 {
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
	for i, r := range list {
		if m.at[i] != 0 {
			continue
		}
		d := digest(r)
		if free := places[d]; len(free) > 0 {
			m.at[i], m.taken[free[0]], places[d] = free[0]+1, true, free[1:]
		}
	}
}
