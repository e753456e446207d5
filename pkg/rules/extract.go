package rules

import "slices"

// Extract learns one table's section: its protected chains, the hooks into
// them with their anchors, and what they lean on.
//
// protects tells which chains are protected; mark tells canaryd's own rules,
// which are part of no generation and count as nobody's neighbour.
func Extract(t *Table, protects func(chain string) bool, mark func(Rule) bool) Section {
	var s Section
	if t == nil {
		return s
	}
	for i := range t.Chains {
		c := &t.Chains[i]
		switch {
		case Builtin(t.Name, c.Name):
			if s.Policies == nil {
				s.Policies = map[string]string{}
			}
			s.Policies[c.Name] = c.Policy
		case protects(c.Name):
			s.Chains = append(s.Chains, Chain{Name: c.Name, Rules: c.Rules})
		}
	}
	for _, name := range builtin[t.Name] {
		if c := t.Chain(name); c != nil {
			s.Hooks = append(s.Hooks, hooks(c, protects, mark)...)
		}
	}
	s.Leans = leans(t, s, protects)
	return s
}

// hooks returns the hooks in one built-in chain with their anchors.
func hooks(c *Chain, protects func(string) bool, mark func(Rule) bool) []Hook {
	var found []Hook
	lastForeign := -1
	for i, r := range c.Rules {
		if !protects(r.Target) && !mark(r) {
			lastForeign = i
		}
	}
	neighbour := -1
	for i, r := range c.Rules {
		switch {
		case mark(r):
		case !protects(r.Target):
			neighbour = i
		default:
			h := Hook{Chain: c.Name, Rule: r, Anchor: Anchor{Position: Top}}
			switch {
			case neighbour >= 0 && i > lastForeign:
				h.Anchor.Position = Bottom
			case neighbour >= 0:
				h.Anchor = Anchor{Position: Behind, Neighbour: c.Rules[neighbour]}
			}
			found = append(found, h)
		}
	}
	return found
}

func leans(t *Table, s Section, protects func(string) bool) []string {
	var found []string
	for _, c := range s.Chains {
		for _, r := range c.Rules {
			if r.Target == "" || protects(r.Target) || t.Chain(r.Target) == nil || slices.Contains(found, r.Target) {
				continue
			}
			found = append(found, r.Target)
		}
	}
	slices.Sort(found)
	return found
}
