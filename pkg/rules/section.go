package rules

import "slices"

// Split divides a section in two: own has the claimed chains and the jumps into them, and
// rest has the remaining ones. canaryd judges own by the declared rules, and learns only
// from rest. If claimed is nil, own is empty.
func (s Section) Split(claimed func(chain string) bool) (own, rest Section) {
	if claimed == nil {
		return Section{}, s
	}
	own, rest = Section{DependsOn: s.DependsOn, Policies: s.Policies}, Section{DependsOn: s.DependsOn, Policies: s.Policies}
	for _, c := range s.Chains {
		part := &rest
		if claimed(c.Name) {
			part = &own
		}
		part.Chains = append(part.Chains, c)
	}
	rest.LedTo = slices.DeleteFunc(slices.Clone(s.LedTo), claimed)
	for _, h := range s.Jumps {
		part := &rest
		if !h.Named && claimed(h.Rule.Target) {
			part = &own
		}
		part.Jumps = append(part.Jumps, h)
	}
	return own, rest
}

// Join returns a section that holds both, the jumps of s before those of second. Its
// policies are second's, if it has any. A chain that one part depends on and the other has
// is in DependsOn no more.
func (s Section) Join(second Section) Section {
	joined := Section{
		Chains:    slices.Concat(s.Chains, second.Chains),
		Jumps:     slices.Concat(s.Jumps, second.Jumps),
		DependsOn: slices.Concat(s.DependsOn, second.DependsOn),
		Policies:  second.Policies,
		LedTo:     slices.Concat(s.ledToBeside(second), second.ledToBeside(s)),
	}
	slices.Sort(joined.LedTo)
	joined.LedTo = slices.Compact(joined.LedTo)
	if joined.Policies == nil {
		joined.Policies = s.Policies
	}
	slices.Sort(joined.DependsOn)
	joined.DependsOn = slices.Compact(joined.DependsOn)
	// One part may have chains that the other part depends on.
	has := make(map[string]bool, len(joined.Chains))
	for _, c := range joined.Chains {
		has[c.Name] = !c.LeftOut()
	}
	joined.DependsOn = slices.DeleteFunc(joined.DependsOn, func(name string) bool { return has[name] })
	if len(joined.DependsOn) == 0 {
		joined.DependsOn = nil
	}
	return joined
}

// ledToBeside returns LedTo without the chains that the other part has for another reason.
// Join calls it for both parts.
func (s Section) ledToBeside(other Section) []string {
	return slices.DeleteFunc(slices.Clone(s.LedTo), func(name string) bool {
		_, has := other.Chain(name)
		return has && !other.IsLedTo(name)
	})
}

// Join returns a generation that holds both, joined table by table.
func (g Generation) Join(second Generation) Generation {
	joined := g.Clone()
	for id, s := range second {
		joined = joined.With(id, joined[id].Join(s))
	}
	return joined
}
