package native

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// With returns the present table with quarantined parts in their places, and these places. still
// are the parts that stay in quarantine: no part that is in force again, or that its owner has
// decided about. The owner has decided if it removed the chain or set of a rule or element. So it
// has if it made a part of that name, or wrote all neighbours again.
func (t *Table) With(held []Held) (whole *Table, fresh map[Spot]bool, still []Held) {
	w := *t
	w.Chains, w.Sets = slices.Clone(t.Chains), slices.Clone(t.Sets)
	w.Objects, w.Flowtables = slices.Clone(t.Objects), slices.Clone(t.Flowtables)
	m := merger{t: &w, c: newContents(t), fresh: map[Spot]bool{}, chains: map[string]int{}, sets: map[string]int{}, rules: map[int][]mergedRule{}}
	for i := range w.Chains {
		m.chains[w.Chains[i].Name] = i
	}
	for i := range w.Sets {
		m.sets[w.Sets[i].Name] = i
	}
	stays := make([]bool, len(held))
	for i, of := range held { // named parts are first
		stays[i] = of.valid() && of.Kind != nft.Rules && of.Kind != nft.Elements && m.part(of)
	}
	for i, of := range held {
		stays[i] = stays[i] || of.valid() && (of.Kind == nft.Elements && m.element(of) || of.Kind == nft.Rules && m.rule(of))
	}
	m.finish()
	return &w, m.fresh, kept(held, func(i int) bool { return stays[i] })
}

// A merger puts quarantined parts into a table.
type merger struct {
	t            *Table
	c            *contents // of the table as it is
	fresh        map[Spot]bool
	chains, sets map[string]int
	rules        map[int][]mergedRule // of the chains that get rules
}

// A mergedRule is a rule of such a chain; digest is zero if the merge adds the rule.
type mergedRule struct {
	Rule
	digest Digest
}

// valid reports whether a part has the data of its kind: it may be from a file. With leaves out
// any other part, as if its owner had decided.
func (of Held) valid() bool {
	switch of.Kind {
	case nft.Chains:
		return of.Chain != nil
	case nft.Sets:
		return of.Set != nil
	case nft.Objects:
		return of.Object != nil
	case nft.Flowtables:
		return of.Flowtable != nil
	case nft.Rules:
		return of.Rule != nil
	}
	return of.Kind == nft.Elements && len(of.Elements) > 0
}

// part adds a chain, set, object or flowtable, unless the table has a part of its name; With
// calls it. True: it stays in quarantine until it is written. False: its owner made it again.
func (m *merger) part(of Held) bool {
	switch of.Kind {
	case nft.Chains:
		if _, stands := m.chains[of.Name]; stands {
			return false
		}
		m.addChain(*of.Chain)
	case nft.Sets:
		if _, stands := m.sets[of.Name]; stands {
			return false
		}
		m.addSet(*of.Set)
	case nft.Objects:
		if slices.ContainsFunc(m.t.Objects, func(o Object) bool { return o.Name == of.Name && o.Type == of.Object.Type }) {
			return false
		}
		m.fresh[Spot{Kind: nft.Objects, At: len(m.t.Objects)}] = true
		m.t.Objects = append(m.t.Objects, *of.Object)
	case nft.Flowtables:
		if slices.ContainsFunc(m.t.Flowtables, func(f Flowtable) bool { return f.Name == of.Name }) {
			return false
		}
		m.fresh[Spot{Kind: nft.Flowtables, At: len(m.t.Flowtables)}] = true
		m.t.Flowtables = append(m.t.Flowtables, *of.Flowtable)
	}
	return true
}

// addChain appends a quarantined chain (part), or a chain that belongs to a quarantined rule
// (belongings). These callers know that the table has none of that name. The chain is fresh: the
// caller of With writes it, and the kernel gives it another handle.
func (m *merger) addChain(c Chain) {
	c.Handle = 0
	m.chains[c.Name] = len(m.t.Chains)
	m.fresh[Spot{Kind: nft.Chains, At: len(m.t.Chains)}] = true
	m.t.Chains = append(m.t.Chains, c)
}

// addSet adds a quarantined set, or the set that belongs to a quarantined rule or element, as
// addChain does a chain. The caller knows that the name is free.
func (m *merger) addSet(s Set) {
	s.Handle = 0
	m.sets[s.Name] = len(m.t.Sets)
	m.fresh[Spot{Kind: nft.Sets, At: len(m.t.Sets)}] = true
	m.t.Sets = append(m.t.Sets, s)
}

// element puts a quarantined element into its set, or both ends of an interval; With calls it.
// True: it stays in quarantine until it is written. False: its owner has decided, because the
// set is gone, or has the element or its key again.
func (m *merger) element(of Held) bool {
	i, stands := m.sets[of.Name]
	if !stands {
		return false
	}
	s := &m.t.Sets[i]
	want := m.c.element(of.Elements[0])
	key := attrOf(of.Elements[0], unix.NFTA_SET_ELEM_KEY)
	for _, e := range s.Elements {
		if m.c.element(e) == want || !isEnd(e) && slices.Equal(attrOf(e, unix.NFTA_SET_ELEM_KEY), key) && !isEnd(of.Elements[0]) {
			return false
		}
	}
	m.belongings(of)
	s.Elements = slices.Clone(s.Elements)
	for _, e := range of.Elements {
		m.fresh[Spot{nft.Elements, i, len(s.Elements)}] = true
		s.Elements = append(s.Elements, e)
	}
	return true
}

// rule adds a rule to its chain, between its former neighbours; With calls it. True: it stays
// in quarantine until it is written. False: its owner has decided, because the chain is gone,
// has the rule again, or was written again without the neighbours.
func (m *merger) rule(of Held) bool {
	i, stands := m.chains[of.Name]
	if !stands {
		return false
	}
	list, begun := m.rules[i]
	if !begun {
		for _, r := range m.t.Chains[i].Rules {
			list = append(list, mergedRule{r, m.c.rule(r)})
		}
	}
	want := newContents(&Table{Sets: of.Sets, Chains: of.Chains}).rule(*of.Rule)
	find := func(d Digest, from int) int {
		for at := from; at < len(list) && d != (Digest{}); at++ {
			if list[at].digest == d {
				return at
			}
		}
		return -1
	}
	before := find(of.Before, 0)
	at := find(of.Behind, before+1)
	switch {
	case find(want, 0) >= 0:
		return false
	case at >= 0:
	case before >= 0:
		for at = before + 1; at < len(list) && list[at].digest == (Digest{}); at++ {
		}
	case of.Before != (Digest{}), of.Behind != (Digest{}), slices.ContainsFunc(list, func(r mergedRule) bool { return r.digest != (Digest{}) }):
		return false // its owner has written the chain again
	default:
		at = len(list)
	}
	m.rules[i] = slices.Insert(list, at, mergedRule{Rule: m.belongings(of)})
	return true
}

// belongings adds the parts that belong to a rule or element, and returns the rule; zero for an
// element. A set gets another name if the kernel has reused its name since. The kernel does not
// reuse the names of such chains.
func (m *merger) belongings(of Held) Rule {
	w := &writer{rename: map[string]string{}}
	for _, s := range of.Sets {
		for n, was := 0, s.Name; ; n++ {
			if _, taken := m.sets[s.Name]; !taken {
				break
			}
			s.Name = fmt.Sprintf("__canaryd_held%d", n)
			w.rename[was] = s.Name
		}
		m.addSet(s)
	}
	renamed := func(r Rule) Rule {
		if attrs, err := w.renamed(r, r.expressions()); err == nil {
			r.Attrs = attrs
		}
		r.Handle = 0
		return r
	}
	for _, c := range of.Chains {
		c.Rules = slices.Clone(c.Rules)
		for i := range c.Rules {
			c.Rules[i] = renamed(c.Rules[i])
		}
		if _, stands := m.chains[c.Name]; !stands {
			m.addChain(c)
		}
	}
	if of.Rule == nil {
		return Rule{}
	}
	return renamed(*of.Rule)
}

// finish puts the rules into their chains, once all are added, and marks the added rules as
// fresh. Rules that were there keep their handles.
func (m *merger) finish() {
	for i, list := range m.rules {
		c := &m.t.Chains[i]
		c.Rules = nil
		for j, r := range list {
			if r.digest == (Digest{}) {
				m.fresh[Spot{nft.Rules, i, j}] = true
			}
			c.Rules = append(c.Rules, r.Rule)
		}
	}
}
