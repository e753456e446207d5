package rules

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/nat"
)

// natHooks are the built-in chains of nat that translate a flow's first packet.
var natHooks = map[string]nat.Hook{"PREROUTING": nat.Prerouting, "OUTPUT": nat.Output, "POSTROUTING": nat.Postrouting}

// NatHooks returns the family's nat rules for [nat.New], which computes the flows that they
// translate.
//
// It reads a rule when the first flow reaches it. Of the 40,000 rules of 5,000 services, it
// reads only the few for the services in question.
func (g Generation) NatHooks(f Family) nat.Hooks {
	s := g[f.Table(Nat)]
	named := make(map[string]*natChain, len(s.Chains))
	chains := make([]natChain, len(s.Chains))
	for i, c := range s.Chains {
		chains[i] = natChain{text: c.Rules, named: named}
		named[c.Name] = &chains[i]
	}
	builtIn := map[string][]Rule{}
	for _, h := range s.Jumps {
		builtIn[h.Chain] = append(builtIn[h.Chain], h.Rule)
	}
	hooks := nat.Hooks{}
	for name, text := range builtIn {
		if hook, ok := natHooks[name]; ok {
			hooks[hook] = []nat.Chain{&natChain{text: text, named: named}}
		}
	}
	return hooks
}

// Rewrites reports whether a nat rule of the family may change a packet's address or port.
// Without one, the kernel translates no connection, and canaryd needs no keeper and no copy
// of nat.
func (g Generation) Rewrites(f Family) bool {
	s := g[f.Table(Nat)]
	return slices.ContainsFunc(s.Jumps, func(h Jump) bool { return isTranslation(h.Rule) }) ||
		slices.ContainsFunc(s.Chains, func(c Chain) bool { return slices.ContainsFunc(c.Rules, isTranslation) })
}

func isTranslation(r Rule) bool {
	var n natRule
	n.effect(r, nil)
	return n.way.Verdict == nat.DNAT || n.way.Verdict == nat.SNAT || n.way.Verdict == nat.Masquerade
}
