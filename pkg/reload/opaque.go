package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// deleteOpaque returns the steps that delete opaque jumps by index. They come first in the script,
// and the last index comes first, so that the indexes stay true.
func deleteOpaque(seen canary.Seen) []iptables.Step {
	var steps []iptables.Step
	for _, chain := range seen.Section.JumpChains(seen.Table.Name) {
		list := seen.Table.Chain(chain).Rules
		for i := len(list) - 1; i >= 0; i-- {
			_, opaque := list[i].Opaque()
			opaque = opaque && !list[i].LeftOut() // a rule that stands for a chain that is left out has no index
			isJump := func(h rules.Jump) bool { return h.Chain == chain && h.Rule == list[i] }
			if opaque && slices.ContainsFunc(seen.Section.Jumps, isJump) {
				steps = append(steps, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
	}
	return steps
}
