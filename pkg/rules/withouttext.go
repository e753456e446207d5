package rules

import (
	"iter"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A TextlessRule is an opaque rule and its chain.
type TextlessRule struct {
	Chain string
	Rule  Rule
}

// WithTexts returns the generation in which the result of text replaces each opaque rule
// that holds its bytes. For replays and for a stored generation, text looks up the rule's
// present text.
func (g Generation) WithTexts(text func(id TableID, chain string, rule Rule) Rule) Generation {
	for id, section := range g {
		g = g.With(id, section.withTexts(func(chain string, rule Rule) Rule { return text(id, chain, rule) }))
	}
	return g
}

// withTexts is WithTexts for one section. It copies only lists that change.
func (s Section) withTexts(text func(chain string, rule Rule) Rule) Section {
	now := func(chain string, rule Rule) Rule {
		if !rule.HasBytes() {
			return rule
		}
		return text(chain, rule)
	}
	jumps, chains := s.Jumps, s.Chains
	for i, h := range jumps {
		if rule := now(h.Chain, h.Rule); rule != h.Rule {
			if &s.Jumps[0] == &jumps[0] {
				s.Jumps = slices.Clone(jumps)
			}
			s.Jumps[i].Rule = rule
		}
	}
	for i, c := range chains {
		list := c.Rules
		for k, old := range c.Rules {
			if rule := now(c.Name, old); rule != old {
				if &list[0] == &c.Rules[0] {
					list = slices.Clone(list)
				}
				list[k] = rule
			}
		}
		if len(list) > 0 && &list[0] != &c.Rules[0] {
			if &s.Chains[0] == &chains[0] {
				s.Chains = slices.Clone(chains)
			}
			s.Chains[i].Rules = list
		}
	}
	return s
}

// Opaque returns the section's opaque rules for status: jumps first, then by chain. found is
// the result for an earlier section, before. Opaque does not search unchanged chains again,
// because a section may hold tens of thousands of rules.
func (s Section) Opaque(before Section, found []TextlessRule) []TextlessRule {
	var all []TextlessRule
	for _, h := range s.Jumps {
		if _, opaque := h.Rule.Opaque(); opaque && !h.LeftOut() {
			all = append(all, TextlessRule{h.Chain, h.Rule})
		}
	}
	jumps := len(all)
	changed, gone := ChangedChains(before.Chains, s.Chains), map[string]bool{}
	for _, c := range changed {
		if c.Was >= 0 {
			gone[before.Chains[c.Was].Name] = true
		}
	}
	for _, f := range found {
		if !gone[f.Chain] && !isBuiltinName(f.Chain) {
			all = append(all, f)
		}
	}
	for _, c := range changed {
		if c.Is < 0 {
			continue
		}
		for _, r := range s.Chains[c.Is].Rules {
			if _, opaque := r.Opaque(); opaque && !r.LeftOut() {
				all = append(all, TextlessRule{s.Chains[c.Is].Name, r})
			}
		}
	}
	sorting.Stable(all[jumps:], func(a, b TextlessRule) int { return strings.Compare(a.Chain, b.Chain) })
	return all
}

// NewRules yields the section's rules, jumps first. It skips chains that have not changed
// since an earlier section, before. The store adds these rules' bytes to its file.
func (s Section) NewRules(before Section) iter.Seq[Rule] {
	return func(yield func(Rule) bool) {
		for _, h := range s.Jumps {
			if !yield(h.Rule) {
				return
			}
		}
		for _, c := range ChangedChains(before.Chains, s.Chains) {
			for i := 0; c.Is >= 0 && i < len(s.Chains[c.Is].Rules); i++ {
				if !yield(s.Chains[c.Is].Rules[i]) {
					return
				}
			}
		}
	}
}
