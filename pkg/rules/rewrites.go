package rules

import "slices"

// Rewrites reports whether a nat rule of the family may change a packet's address or port.
// Without one, the kernel translates no connection.
func (g Generation) Rewrites(f Family) bool {
	s := g[f.Table(Nat)]
	return slices.ContainsFunc(s.Jumps, func(h Jump) bool { return isTranslation(h.Rule) }) ||
		slices.ContainsFunc(s.Chains, func(c Chain) bool { return slices.ContainsFunc(c.Rules, isTranslation) })
}

func isTranslation(r Rule) bool {
	switch r.Target {
	case "DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP":
		return true
	default:
		return false
	}
}
