package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file selects the chains and jumps that are compared with a source's declaration.

// withoutLeftOut returns both sections without chains that are left out: their rules are
// unknown, and must not count as drift.
func withoutLeftOut(declared, standing rules.Section, t *rules.Table) (rules.Section, rules.Section) {
	if !t.AnyLeftOut() {
		return declared, standing
	}
	cut := func(s rules.Section) rules.Section {
		s.Chains = slices.DeleteFunc(slices.Clone(s.Chains), func(c rules.Chain) bool { return t.Chain(c.Name).LeftOut() })
		s.Jumps = slices.DeleteFunc(slices.Clone(s.Jumps), func(h rules.Jump) bool { return t.Chain(h.Chain).LeftOut() })
		return s
	}
	return cut(declared), cut(standing)
}

// withoutReferenced returns standing without the undeclared chains that rules of other owners
// lead to, so that they are no drift. The kernel refuses to delete these chains, and they get
// no packets from declared chains.
func withoutReferenced(declared rules.Section, standing []rules.Chain, t *rules.Table, claimed func(string) bool) []rules.Chain {
	extra := map[string][]rules.Rule{}
	for _, c := range standing {
		extra[c.Name] = c.Rules
	}
	for _, c := range declared.Chains {
		delete(extra, c.Name)
	}
	if len(extra) == 0 {
		return standing
	}
	referenced := map[string]bool{}
	var follow func(list []rules.Rule)
	follow = func(list []rules.Rule) {
		for _, r := range list {
			if inner, ok := extra[r.Target]; ok && !referenced[r.Target] {
				referenced[r.Target] = true
				follow(inner)
			}
		}
	}
	for _, c := range t.Chains {
		if c.LeftOut() { // its rules may lead to any of them
			return slices.DeleteFunc(slices.Clone(standing), func(c rules.Chain) bool { _, isExtra := extra[c.Name]; return isExtra })
		}
		if !claimed(c.Name) && !rules.Builtin(t.Name, c.Name) {
			follow(c.Rules)
		}
	}
	return slices.DeleteFunc(slices.Clone(standing), func(c rules.Chain) bool { return referenced[c.Name] })
}
