package canary

import "github.com/canaryd/canaryd/pkg/rules"

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
