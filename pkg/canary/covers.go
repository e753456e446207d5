package canary

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Covers reports whether an owner has put its rules back after a loss, so that the loss is
// over. Each jump must be present and lead to a chain with rules. Each chain that no rule leads
// to, such as a hint, must exist again. An owner may write other rules than before, so Covers
// requires less than Judge.
func Covers(want rules.Section, t *rules.Table) bool {
	for _, h := range missingJumps(want, t) {
		if !Superseded(want, t.Rules(h.Chain), h) {
			return false
		}
	}
	led := map[string]bool{}
	for _, h := range want.Jumps {
		if c, ok := want.Chain(h.Into()); ok && len(c.Rules) > 0 && !hasRules(t, c.Name) {
			return false
		}
		led[h.Into()] = true
	}
	for _, c := range want.Chains {
		for _, r := range c.Rules {
			led[r.Target] = true
		}
	}
	for _, c := range want.Chains {
		if !led[c.Name] && (t.Chain(c.Name) == nil || len(c.Rules) > 0 && !hasRules(t, c.Name)) {
			return false
		}
	}
	return true
}

// sameContent reports whether two sections hold the same chains, rules and jumps. The places of
// jumps do not count, because canaryd never corrects them.
func sameContent(want, seen rules.Section) bool {
	if len(want.Chains) != len(seen.Chains) || len(want.Jumps) != len(seen.Jumps) {
		return false
	}
	for _, c := range rules.ChangedChains(want.Chains, seen.Chains) {
		if c.Was < 0 || c.Is < 0 || !rules.EqualRules(want.Chains[c.Was].Rules, seen.Chains[c.Is].Rules) {
			return false
		}
	}
	return slices.EqualFunc(want.Jumps, seen.Jumps, rules.Jump.Same) ||
		slices.EqualFunc(sortedJumps(want), sortedJumps(seen), rules.Jump.Same)
}

func sortedJumps(s rules.Section) []rules.Jump {
	jumps := slices.Clone(s.Jumps)
	sorting.Stable(jumps, func(a, b rules.Jump) int { return strings.Compare(a.String(), b.String()) })
	return jumps
}
