package rules

import (
	"maps"
	"slices"
)

// An Extraction is the section of a table, with the knowledge that makes the next one cheap. It
// holds for one Protection. The zero Extraction is of no table.
type Extraction struct {
	Section Section
	table   *Table
	own     []Chain        // the protected chains, with which Section.Chains begins
	leads   map[string]int // targets of their rules that are not protected, with the rules' number
	leftOut []string       // the protected chains that are left out
	missing bool           // Section counts missing rules, too
}

// ExtractNext is Extract for a table whose earlier Extraction is last. It looks only into
// chains whose rules are not the same memory as before. missing are rules that count as if
// protected chains held them: a rule that cannot be put back still leads to a chain.
func (p Protection) ExtractNext(last Extraction, t *Table, mark func(Rule) bool, missing []Rule) Extraction {
	switch {
	case t == nil:
		return Extraction{}
	case last.table == t && !last.missing && len(missing) == 0:
		return last
	}
	x := p.ownChains(last, t)
	x.missing = len(missing) > 0
	s := &x.Section
	for _, name := range builtin[t.Name] {
		c := t.Chain(name)
		if c == nil {
			continue
		}
		if s.Policies == nil {
			s.Policies = map[string]string{}
		}
		s.Policies[name] = c.Policy
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
	p.follow(&x, missing)
	return x
}

// ownChains begins an Extraction with the protected chains. It walks through both tables in
// the order of the names, and takes over unchanged chains. If a table has another order, that
// costs time, and nothing else.
func (p Protection) ownChains(last Extraction, t *Table) Extraction {
	if last.table == t {
		return Extraction{table: t, own: last.own, leads: last.leads, leftOut: last.leftOut}
	}
	x := Extraction{table: t, leads: map[string]int{}, leftOut: slices.Clone(last.leftOut)}
	maps.Copy(x.leads, last.leads)
	var before []Chain // of the earlier table, not met yet
	if last.table != nil {
		before = last.table.Chains
	}
	own := last.own // of before
	next := func() (c *Chain, protected bool) {
		c, before = &before[0], before[1:]
		if protected = len(own) > 0 && own[0].Name == c.Name; protected {
			own = own[1:]
		}
		return c, protected
	}
	drop := func() {
		if c, protected := next(); protected {
			x.forget(p, c)
		}
	}
	first := 0 // the place of the first protected chain
	for i := range t.Chains {
		c := &t.Chains[i]
		for len(before) > 0 && before[0].Name < c.Name {
			drop()
		}
		switch {
		case len(before) > 0 && before[0].Name == c.Name:
			was, protected := next()
			if !protected {
				continue
			}
			if !sameMemory(was.Rules, c.Rules) {
				x.forget(p, was)
				x.add(p, c)
			}
		case Builtin(t.Name, c.Name), !p.Chain(c.Name), !isChainName(c.Name): // the kernel takes names that iptables-restore cannot read
			continue
		default:
			x.add(p, c)
		}
		// Mostly the protected chains are neighbours. Then they share the table's memory, which is
		// 0.9 MB at 5,000 services.
		if len(x.own) == 0 {
			first = i
		}
		if i-first == len(x.own) {
			x.own = t.Chains[first : i+1 : i+1]
		} else {
			x.own = append(x.own, *c) // the first one copies
		}
	}
	for len(before) > 0 {
		drop()
	}
	same := func(a, b Chain) bool { return a.Name == b.Name && sameMemory(a.Rules, b.Rules) }
	if slices.EqualFunc(last.own, x.own, same) { // in the same order, too: next relies on it
		x.own = last.own
	}
	return x
}

// add counts the targets of a protected chain. ownChains calls it for new and changed chains.
func (x *Extraction) add(p Protection, c *Chain) {
	if c.LeftOut() {
		x.leftOut = append(x.leftOut, c.Name)
		return
	}
	for _, r := range c.Rules {
		if r.Target != "" && !p.Chain(r.Target) {
			x.leads[r.Target]++
		}
	}
}

// forget undoes add for a chain of the earlier table that is gone or changed. If the order of
// the chains has changed, add has already counted the same chain again.
func (x *Extraction) forget(p Protection, c *Chain) {
	if c.LeftOut() {
		i := slices.Index(x.leftOut, c.Name)
		x.leftOut = slices.Delete(x.leftOut, i, i+1)
		return
	}
	for _, r := range c.Rules {
		if r.Target == "" || p.Chain(r.Target) {
			continue
		}
		if x.leads[r.Target]--; x.leads[r.Target] == 0 {
			delete(x.leads, r.Target)
		}
	}
}

// follow completes the section: it adds the chains of other owners that protected rules lead
// to, directly or through each other. Chains that a replay cannot write, protected or not, are
// added to DependsOn. The missing rules count as protected.
func (p Protection) follow(x *Extraction, missing []Rule) {
	s, taken := &x.Section, map[string]bool{}
	s.Chains, s.DependsOn = slices.Clip(x.own), append([]string(nil), x.leftOut...)
	from := func(target string) {
		if target == "" || taken[target] || p.Chain(target) {
			return
		}
		c := x.table.Chain(target)
		if c == nil {
			return
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
	for _, r := range missing {
		from(r.Target)
	}
	for _, target := range slices.Sorted(maps.Keys(x.leads)) {
		from(target)
	}
	for i := len(x.own); i < len(s.Chains); i++ {
		if s.Chains[i].LeftOut() {
			s.DependsOn = append(s.DependsOn, s.Chains[i].Name)
			continue
		}
		for _, r := range s.Chains[i].Rules {
			from(r.Target)
		}
	}
	slices.Sort(s.LedTo)
	slices.Sort(s.DependsOn)
}
