package rules

import "slices"

// Narrow returns the protected part of a generation, which the daemon recalls at its start
// or restores on request. A generation of an earlier run may have more rules. They are still
// in the kernel, but canaryd no longer reads them; this is neither a loss nor a removal.
func (p Protection) Narrow(g Generation) Generation {
	narrowed := Generation{}
	for id, s := range g {
		narrowed = narrowed.With(id, p.narrow(id.Name, s))
	}
	return narrowed
}

// narrow is Narrow for the section of table t. It keeps chains of others to which the
// remaining chains lead.
func (p Protection) narrow(t TableName, s Section) Section {
	next, dropped := s, map[string]bool{} // built-in chains that lose a jump
	next.Jumps = slices.DeleteFunc(slices.Clone(s.Jumps), func(h Jump) bool {
		out := !h.LeftOut() && !p.Chain(h.Rule.Target) && (p.Rule == nil || !p.Rule(t, h.Chain, h.Rule))
		dropped[h.Chain] = dropped[h.Chain] || out
		return out
	})
	own := func(c Chain) bool { return p.Chain(c.Name) }
	if len(next.Jumps) == len(s.Jumps) && !slices.ContainsFunc(s.Chains, func(c Chain) bool { return !own(c) && !s.IsLedTo(c.Name) }) {
		return s
	}
	next.Alone = slices.DeleteFunc(slices.Clone(s.Alone), func(chain string) bool { return dropped[chain] })
	next.Chains, next.LedTo, next.DependsOn = nil, nil, nil
	rest, targets := map[string]Chain{}, map[string]bool{}
	for _, c := range s.Chains {
		if own(c) {
			next.Chains = append(next.Chains, c)
		} else {
			rest[c.Name] = c
		}
	}
	for i := 0; i < len(next.Chains); i++ { // it grows
		for _, r := range next.Chains[i].Rules {
			targets[r.Target] = true
			if c, is := rest[r.Target]; is && (s.IsLedTo(c.Name) || p.Follow != nil && p.Follow(c.Name) && isChainName(c.Name)) {
				next.Chains, next.LedTo = append(next.Chains, c), append(next.LedTo, c.Name)
				delete(rest, c.Name)
			}
		}
	}
	slices.Sort(next.LedTo)
	for _, name := range s.DependsOn {
		if targets[name] || slices.ContainsFunc(next.Chains, func(c Chain) bool { return c.Name == name }) {
			next.DependsOn = append(next.DependsOn, name)
		}
	}
	return next
}
