package rules

import "slices"

// A chain that is left out exists in the kernel and holds more rules than canaryd keeps. In
// memory a single opaque rule replaces all of them. So the chain is neither empty nor missing,
// it equals itself after any change of its rules, and it is never written.

// leftOutReason is the reason of the opaque rule that replaces a chain's rules.
const leftOutReason = "its chain is left out: there are more rules than canaryd keeps (--max-rules)"

// LeftOut returns the rule that replaces the rules of a chain that is left out.
func LeftOut(chain string) []Rule {
	return []Rule{OpaqueRule([]byte("left out "+chain), "", leftOutReason)}
}

// LeftOut reports whether the rule replaces all rules of a chain that is left out.
func (r Rule) LeftOut() bool {
	reason, opaque := r.Opaque()
	return opaque && reason == leftOutReason
}

// LeftOut reports whether the chain is left out. A missing chain is not.
func (c *Chain) LeftOut() bool { return c != nil && len(c.Rules) == 1 && c.Rules[0].LeftOut() }

// AnyLeftOut reports whether a chain of the table is left out.
func (t *Table) AnyLeftOut() bool {
	return t != nil && slices.ContainsFunc(t.Chains, func(c Chain) bool { return c.LeftOut() })
}

// LeftOut reports whether the jump replaces all jumps of a built-in chain that is left out.
func (h Jump) LeftOut() bool { return h.Named && h.Rule.LeftOut() }

// WitnessedChains returns the built-in chains that get a witness when a replay plants marks:
// the chains with jumps, in the order of netfilter's hooks. A chain that is left out gets
// none, because canaryd could not find its witness there.
func (s Section) WitnessedChains(table TableName) []string {
	var names []string
	for _, name := range s.JumpChains(table) {
		if slices.ContainsFunc(s.Jumps, func(h Jump) bool { return h.Chain == name && !h.LeftOut() }) {
			names = append(names, name)
		}
	}
	return names
}
