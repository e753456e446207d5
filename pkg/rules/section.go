package rules

import "slices"

// Split parts a section into what concerns the claimed chains, those chains
// and the jumps into them, and the rest.
func (s Section) Split(claimed func(chain string) bool) (own, rest Section) {
	if claimed == nil {
		return Section{}, s
	}
	own, rest = Section{Leans: s.Leans, Policies: s.Policies}, Section{Leans: s.Leans, Policies: s.Policies}
	for _, c := range s.Chains {
		part := &rest
		if claimed(c.Name) {
			part = &own
		}
		part.Chains = append(part.Chains, c)
	}
	for _, h := range s.Jumps {
		part := &rest
		if !h.Named && claimed(h.Rule.Target) {
			part = &own
		}
		part.Jumps = append(part.Jumps, h)
	}
	return own, rest
}

// Join returns a section that holds both, first's jumps before second's.
func (s Section) Join(second Section) Section {
	joined := Section{
		Chains:   slices.Concat(s.Chains, second.Chains),
		Jumps:    slices.Concat(s.Jumps, second.Jumps),
		Leans:    slices.Concat(s.Leans, second.Leans),
		Policies: second.Policies,
	}
	if joined.Policies == nil {
		joined.Policies = s.Policies
	}
	slices.Sort(joined.Leans)
	joined.Leans = slices.Compact(joined.Leans)
	// What one part leans on the other may bring.
	brought := make(map[string]bool, len(joined.Chains))
	for _, c := range joined.Chains {
		brought[c.Name] = !c.LeftOut()
	}
	joined.Leans = slices.DeleteFunc(joined.Leans, func(name string) bool { return brought[name] })
	if len(joined.Leans) == 0 {
		joined.Leans = nil
	}
	return joined
}

// Join returns a generation that holds both.
func (g Generation) Join(second Generation) Generation {
	joined := g.Clone()
	for id, s := range second {
		joined = joined.With(id, joined[id].Join(s))
	}
	return joined
}
