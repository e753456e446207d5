package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// deleteOpaque deletes the jumps that have no text, by their place: the last one first, and before
// everything else, so that the places stay true.
func deleteOpaque(seen canary.Seen) []iptables.Step {
	var steps []iptables.Step
	for _, chain := range seen.Section.JumpChains(seen.Table.Name) {
		list := seen.Table.Chain(chain).Rules
		for i := len(list) - 1; i >= 0; i-- {
			_, opaque := list[i].Opaque()
			opaque = opaque && !list[i].LeftOut() // that one stands for rules of which no place is known
			isJump := func(h rules.Jump) bool { return h.Chain == chain && h.Rule == list[i] }
			if opaque && slices.ContainsFunc(seen.Section.Jumps, isJump) {
				steps = append(steps, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
	}
	return steps
}
