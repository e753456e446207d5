package rules

import "slices"

// A Protection says what is protected. protect.Selector makes one from --protect.
type Protection struct {
	// Chain reports whether a chain is protected. A rule of a built-in chain that leads into a
	// protected chain is a jump.
	Chain func(name string) bool
	// Rule reports whether another rule of a built-in chain is protected too; nil means none.
	Rule func(t TableName, chain string, r Rule) bool
	// Piecewise reports whether many owners share a chain and each writes its own rules only,
	// as portmap does for each host port; nil means none.
	Piecewise func(chain string) bool
}

// Extract returns one table's section: its protected chains, the jumps with their anchors, and
// the chains that they depend on. mark reports whether a rule is canaryd's own: such rules belong
// to no generation and are no neighbours of a jump.
func (p Protection) Extract(t *Table, mark func(Rule) bool) Section {
	protects := p.Chain
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
		case protects(c.Name) && isChainName(c.Name): // the kernel takes names that iptables-restore cannot read
			s.Chains = append(s.Chains, Chain{Name: c.Name, Rules: c.Rules})
		}
	}
	for _, name := range builtin[t.Name] {
		c := t.Chain(name)
		if c == nil {
			continue
		}
		if c.LeftOut() {
			// Its jumps are unknown: one Named jump stands for all of them.
			s.Jumps = append(s.Jumps, Jump{Chain: name, Rule: c.Rules[0], Anchor: Anchor{Position: Top}, Named: true})
			continue
		}
		found, alone := p.jumps(t.Name, c, mark)
		s.Jumps = append(s.Jumps, found...)
		if alone {
			s.Alone = append(s.Alone, name)
		}
	}
	s.DependsOn = dependencies(t, s, protects)
	return s
}

// jumps returns the jumps in one built-in chain with their anchors. alone says that the chain has
// jumps and no foreign rule.
func (p Protection) jumps(t TableName, c *Chain, mark func(Rule) bool) (found []Jump, alone bool) {
	const foreign, ours, jump, named = 0, 1, 2, 3
	kinds := make([]byte, len(c.Rules))
	lastForeign := -1
	for i, r := range c.Rules {
		switch {
		case mark(r):
			kinds[i] = ours
		case p.Chain(r.Target):
			kinds[i] = jump
		case p.Rule != nil && p.Rule(t, c.Name, r):
			kinds[i] = named
		default:
			lastForeign = i
		}
	}
	neighbour := -1
	for i, r := range c.Rules {
		switch kinds[i] {
		case ours:
		case foreign:
			neighbour = i
		default:
			h := Jump{Chain: c.Name, Rule: r, Anchor: Anchor{Position: Top}, Named: kinds[i] == named}
			switch {
			case neighbour >= 0 && i > lastForeign:
				h.Anchor.Position = Bottom
			case neighbour >= 0:
				h.Anchor = Anchor{Position: Behind, Neighbour: c.Rules[neighbour]}
			}
			found = append(found, h)
		}
	}
	return found, len(found) > 0 && lastForeign < 0
}

// dependencies returns the chains that protected rules jump to and that a replay does not write:
// other owners' chains, and protected chains that are left out.
func dependencies(t *Table, s Section, protects func(string) bool) []string {
	var found []string
	for _, c := range s.Chains {
		if c.LeftOut() {
			found = append(found, c.Name)
		}
	}
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
