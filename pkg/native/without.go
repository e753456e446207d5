package native

import (
	"slices"

	"golang.org/x/sys/unix"
)

// Without returns the table without these chains, and without the rules and elements that lead to
// them. A replay of it does not put back chains that their owner deleted since the table was read.
// It shares memory with t; it is t if t has none of the chains.
func (t *Table) Without(chains map[string]bool) *Table {
	is := func(c Chain) bool { return chains[c.Name] }
	if !slices.ContainsFunc(t.Chains, is) {
		return t
	}
	next := *t
	next.Chains = slices.DeleteFunc(slices.Clone(t.Chains), is)
	for i := range next.Chains {
		c := &next.Chains[i]
		c.Rules = slices.DeleteFunc(slices.Clone(c.Rules), func(r Rule) (leads bool) {
			names(r.expressions(), func(string) {}, func(to string) { leads = leads || chains[to] })
			return leads
		})
	}
	next.Sets = slices.Clone(t.Sets)
	for i := range next.Sets {
		s := &next.Sets[i]
		s.Elements = slices.DeleteFunc(slices.Clone(s.Elements), func(e Element) bool {
			return chains[jumpOf(attrOf(e, unix.NFTA_SET_ELEM_DATA))]
		})
	}
	return &next
}
