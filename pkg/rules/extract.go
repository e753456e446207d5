package rules

import (
	"iter"
	"slices"
)

// A Protection defines the protected chains and rules. protect.Selector makes one from
// --protect.
type Protection struct {
	// Chain reports whether a chain is protected. A rule of a built-in chain that leads into a
	// protected chain is a jump.
	Chain func(name string) bool
	// Rule reports whether another rule of a built-in chain is protected too; nil means none. A
	// rule that leads into a chain is not protected, even if Rule returns true: see LeadingOut.
	Rule func(t TableName, chain string, r Rule) bool
	// Piecewise reports whether many owners share a chain and each writes its own rules only,
	// as portmap does for each host port; nil means none.
	Piecewise func(chain string) bool
	// Follow reports whether canaryd guards a chain that is not protected by itself if
	// protected rules lead to it; see Section.LedTo. nil means no such chain.
	Follow func(chain string) bool
}

// Extract returns one table's section: its protected chains, the chains that they lead to or
// depend on, and the jumps with their anchors. mark reports whether a rule is canaryd's own:
// such a rule belongs to no generation and is no neighbour of a jump.
func (p Protection) Extract(t *Table, mark func(Rule) bool) Section {
	return p.ExtractWith(t, mark, nil)
}

// ExtractWith is Extract as if protected chains held the missing rules too. A rule that
// cannot be put back still leads to a chain. mark recognizes canaryd's own rules, which do
// not count. A nil t gives an empty section.
func (p Protection) ExtractWith(t *Table, mark func(Rule) bool, missing []Rule) Section {
	var s Section
	if t == nil {
		return s
	}
	s.Chains = p.chains(t)
	for _, name := range builtin[t.Name] {
		if c := t.Chain(name); c != nil {
			if s.Policies == nil {
				s.Policies = map[string]string{}
			}
			s.Policies[name] = c.Policy
		}
	}
	for _, name := range builtin[t.Name] {
		c := t.Chain(name)
		if c == nil {
			continue
		}
		if c.LeftOut() {
			// Its jumps are unknown: one Named jump represents all of them.
			s.Jumps = append(s.Jumps, Jump{Chain: name, Rule: c.Rules[0], Anchor: Anchor{Position: Top}, Named: true})
			continue
		}
		found, alone := p.jumps(t, c, mark)
		s.Jumps = append(s.Jumps, found...)
		if alone {
			s.Alone = append(s.Alone, name)
		}
	}
	p.follow(t, &s, missing)
	return s
}

// chains returns the protected chains of a table, for ExtractWith. Mostly they are neighbours in
// the table. Then the section shares the table's memory, 0.9 MB at 5,000 services.
func (p Protection) chains(t *Table) []Chain {
	var found []Chain
	first := 0
	for i := range t.Chains {
		c := &t.Chains[i]
		if Builtin(t.Name, c.Name) || !p.Chain(c.Name) || !isChainName(c.Name) { // the kernel takes names that iptables-restore cannot read
			continue
		}
		if found == nil {
			first = i
		}
		if i-first == len(found) {
			found = t.Chains[first : i+1 : i+1]
		} else {
			found = append(found, *c) // the first one copies
		}
	}
	return found
}

// jumps returns the jumps in built-in chain c with their anchors, for ExtractWith. alone
// says that the chain has jumps and no foreign rule. mark recognizes canaryd's own rules.
func (p Protection) jumps(t *Table, c *Chain, mark func(Rule) bool) (found []Jump, alone bool) {
	anchor, last := Anchor{Position: Top}, 0 // found[last:] are behind the last foreign rule
	for _, r := range c.Rules {
		named := false
		switch {
		case mark(r):
			continue
		case p.Chain(r.Target):
		case p.names(t, c.Name, r) && t.Chain(r.Target) == nil:
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

func (p Protection) names(t *Table, chain string, r Rule) bool {
	return p.Rule != nil && p.Rule(t.Name, chain, r)
}

// LeadingOut returns the rules of built-in chains that Rule names, but that lead into chains
// without protection. They are not protected, and the daemon warns of them. The kernel
// refuses such a rule if its chain is missing, and then all rules of its table in the same
// restore.
func (p Protection) LeadingOut(t *Table, mark func(Rule) bool) []Jump {
	if t == nil || p.Rule == nil {
		return nil
	}
	var found []Jump
	for _, name := range builtin[t.Name] {
		for _, r := range t.Rules(name) {
			if !mark(r) && !p.Chain(r.Target) && t.Chain(r.Target) != nil && p.names(t, name, r) {
				found = append(found, Jump{Chain: name, Rule: r})
			}
		}
	}
	return found
}

// follow adds to s the chains of other owners that protected rules lead to, directly or
// through each other. Chains that a replay cannot write, protected or not, are added to
// DependsOn. The missing rules count as protected. ExtractWith calls it.
func (p Protection) follow(t *Table, s *Section, missing []Rule) {
	taken := map[string]bool{}
	from := func(list []Rule) {
		for _, r := range list {
			if r.Target == "" || p.Chain(r.Target) || taken[r.Target] {
				continue
			}
			c := t.Chain(r.Target)
			if c == nil {
				continue
			}
			taken[c.Name] = true
			switch {
			case p.Follow != nil && p.Follow(c.Name) && isChainName(c.Name):
				s.Chains = append(s.Chains, Chain{Name: c.Name, Rules: c.Rules})
				s.LedTo = append(s.LedTo, c.Name)
			default:
				s.DependsOn = append(s.DependsOn, c.Name)
			}
		}
	}
	from(missing)
	for i := 0; i < len(s.Chains); i++ {
		if s.Chains[i].LeftOut() {
			s.DependsOn = append(s.DependsOn, s.Chains[i].Name)
			continue
		}
		from(s.Chains[i].Rules)
	}
	slices.Sort(s.LedTo)
	slices.Sort(s.DependsOn)
}

// Others are the rules of a table that nothing guards. This is the only definition of them: the
// count of lost rules, status and detect use it.
type Others struct {
	protection Protection
	table      *Table
	mark       func(Rule) bool
	// taken are the chains that are guarded without a word that names them. true: their jumps
	// are too.
	taken map[string]bool
}

// OthersIn returns the rules of others in a table. These are all rules except protected rules,
// rules of chains that protected rules lead to, rules of want's chains, and marks. want is the
// table's section of the generation, as far as it is known. It adds the declared chains, and
// the chains to which only quarantined rules lead.
func (p Protection) OthersIn(t *Table, want Section, mark func(Rule) bool) Others {
	o := Others{protection: p, table: t, mark: mark}
	if t == nil {
		return o
	}
	o.taken = map[string]bool{}
	for _, name := range p.Extract(t, mark).LedTo {
		o.taken[name] = false
	}
	for _, c := range want.Chains {
		if _, known := o.taken[c.Name]; !known && !p.Chain(c.Name) {
			o.taken[c.Name] = !want.IsLedTo(c.Name)
		}
	}
	return o
}

// Guards reports whether a chain that is not built in is guarded. The kernel accepts names that
// iptables-restore cannot read: no generation has a chain of such a name.
func (o Others) Guards(chain string) bool {
	_, taken := o.taken[chain]
	return taken || o.protection.Chain(chain) && isChainName(chain)
}

// Rules yields the rules of others, with their chains. The inventory counts them, and
// UnguardedIn and Gone examine them.
func (o Others) Rules() iter.Seq2[*Chain, Rule] {
	return func(yield func(*Chain, Rule) bool) {
		if o.table == nil {
			return
		}
		for i := range o.table.Chains {
			c := &o.table.Chains[i]
			builtin := Builtin(o.table.Name, c.Name)
			if !builtin && o.Guards(c.Name) {
				continue
			}
			for _, r := range c.Rules {
				if o.mark(r) || builtin && o.guardsRule(c.Name, r) {
					continue
				}
				if !yield(c, r) {
					return
				}
			}
		}
	}
}

// guardsRule reports whether a rule of a built-in chain is a jump, or is protected by name.
func (o Others) guardsRule(chain string, r Rule) bool {
	p := o.protection
	return p.Chain(r.Target) || o.taken[r.Target] || p.names(o.table, chain, r) && o.table.Chain(r.Target) == nil
}

// Gone counts the rules that are missing from now, the table after a flush; nil: it does not
// exist. The flush record shows the count: nothing puts these rules back.
func (o Others) Gone(now *Table) (gone int) {
	var of *Chain
	var left map[Key]int
	for c, r := range o.Rules() {
		if c != of {
			of, left = c, map[Key]int{}
			for _, r := range now.Rules(c.Name) {
				left[r.Key()]++
			}
		}
		if left[r.Key()]--; left[r.Key()] < 0 {
			gone++
		}
	}
	return gone
}
