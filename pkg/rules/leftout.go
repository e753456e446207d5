package rules

// A chain that is left out stands in the kernel and holds more rules than canaryd keeps of it. In
// memory it has one opaque rule in the place of all: so it is neither empty nor missing, is equal
// to itself however often its rules change, and is never written.

// leftOutReason is the reason that the opaque rule of a chain that is left out has.
const leftOutReason = "its chain is left out: there are more rules than canaryd keeps (--max-rules)"

// LeftOut returns what stands for the rules of a chain that is left out.
func LeftOut(chain string) []Rule {
	return []Rule{OpaqueRule([]byte("left out "+chain), "", leftOutReason)}
}

// LeftOut reports whether the rule stands for all of a chain that is left out.
func (r Rule) LeftOut() bool {
	reason, opaque := r.Opaque()
	return opaque && reason == leftOutReason
}

// LeftOut reports whether the chain is left out. A missing chain is not.
func (c *Chain) LeftOut() bool { return c != nil && len(c.Rules) == 1 && c.Rules[0].LeftOut() }

// AnyLeftOut reports whether a chain of the table is left out.
func (t *Table) AnyLeftOut() bool {
	if t != nil {
		for i := range t.Chains {
			if t.Chains[i].LeftOut() {
				return true
			}
		}
	}
	return false
}

// LeftOut reports whether the jump stands for those of a built-in chain that is left out.
func (h Jump) LeftOut() bool { return h.Named && h.Rule.LeftOut() }

// WitnessedChains returns the built-in chains that hold jumps and whose rules are kept, in
// kernel order: canaryd could not find its own rule in the others again.
func (s Section) WitnessedChains(table TableName) []string {
	var names []string
	for _, name := range s.JumpChains(table) {
		for _, h := range s.Jumps {
			if h.Chain == name && !h.LeftOut() {
				names = append(names, name)
				break
			}
		}
	}
	return names
}
