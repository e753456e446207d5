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
		case p.Chain(c.Name) && isChainName(c.Name): // the kernel takes names that iptables-restore cannot read
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
	s.DependsOn = p.dependencies(t, s)
	return s
}

// jumps returns the jumps in one built-in chain with their anchors. alone says that the chain has
// jumps and no foreign rule.
func (p Protection) jumps(t TableName, c *Chain, mark func(Rule) bool) (found []Jump, alone bool) {
	anchor, last := Anchor{Position: Top}, 0 // found[last:] stand behind the last foreign rule
	for _, r := range c.Rules {
		named := false
		switch {
		case mark(r):
			continue
		case p.Chain(r.Target):
		case p.Rule != nil && p.Rule(t, c.Name, r):
			named = true
		default:
			anchor, last = Anchor{Position: Behind, Neighbour: r}, len(found)
			continue
		}
		found = append(found, Jump{Chain: c.Name, Rule: r, Anchor: anchor, Named: named})
	}
	if anchor.Position == Top {
		return found, len(found) > 0
	}
	for i := range found[last:] {
		found[last+i].Anchor = Anchor{Position: Bottom}
	}
	return found, false
}

// dependencies returns the chains that protected rules jump to and that a replay does not write:
// other owners' chains, and protected chains that are left out.
func (p Protection) dependencies(t *Table, s Section) []string {
	var found []string
	for _, c := range s.Chains {
		if c.LeftOut() {
			found = append(found, c.Name)
		}
	}
	for _, c := range s.Chains {
		for _, r := range c.Rules {
			if r.Target == "" || p.Chain(r.Target) || t.Chain(r.Target) == nil || slices.Contains(found, r.Target) {
				continue
			}
			found = append(found, r.Target)
		}
	}
	slices.Sort(found)
	return found
}

// OthersGone counts the rules that before holds and now does not, without protected rules and
// marks. A nil table does not exist.
func (p Protection) OthersGone(before, now *Table, mark func(Rule) bool) int {
	if before == nil {
		return 0
	}
	gone := 0
	for _, c := range before.Chains {
		builtin := Builtin(before.Name, c.Name)
		if !builtin && p.Chain(c.Name) {
			continue
		}
		left := map[string]int{}
		for _, r := range now.Rules(c.Name) {
			left[r.Spec]++
		}
		for _, r := range c.Rules {
			if mark(r) || builtin && (p.Chain(r.Target) || p.Rule != nil && p.Rule(before.Name, c.Name, r)) {
				continue
			}
			if left[r.Spec]--; left[r.Spec] < 0 {
				gone++
			}
		}
	}
	return gone
}
