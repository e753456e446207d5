package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file says what of a table is compared with what a source declared.

// compared returns what of two sections can be compared: nothing of chains that are left out.
func compared(declared, standing rules.Section, t *rules.Table) (rules.Section, rules.Section) {
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

// withoutHeld leaves out the chains that are not declared but that rules of others
// lead to: the kernel lets nobody delete them, and they take no packet from what
// is declared.
func withoutHeld(declared rules.Section, standing []rules.Chain, t *rules.Table, claimed func(string) bool) []rules.Chain {
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
	held := map[string]bool{}
	var hold func(list []rules.Rule)
	hold = func(list []rules.Rule) {
		for _, r := range list {
			if inner, ok := extra[r.Target]; ok && !held[r.Target] {
				held[r.Target] = true
				hold(inner)
			}
		}
	}
	for _, c := range t.Chains {
		if c.LeftOut() { // its rules may lead to any of them
			return slices.DeleteFunc(slices.Clone(standing), func(c rules.Chain) bool { _, held := extra[c.Name]; return held })
		}
		if !claimed(c.Name) && !rules.Builtin(t.Name, c.Name) {
			hold(c.Rules)
		}
	}
	return slices.DeleteFunc(slices.Clone(standing), func(c rules.Chain) bool { return held[c.Name] })
}
