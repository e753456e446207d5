package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// removeDoubles plans to delete the copies of the task's doubled jumps that exceed the
// generation. It deletes by index, the last one first, so that the remaining indexes stay true.
// It returns nil if there are none.
func removeDoubles(task tableTask, _ canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed {
		return nil
	}
	plan := task.plan(task.want.Mark)
	for _, chain := range task.want.Section.JumpChains(task.table) {
		left := map[rules.Key]int{}
		for _, h := range task.want.Section.Jumps {
			if h.Chain == chain && slices.ContainsFunc(task.doubled, h.Same) {
				left[h.Rule.Key()]++
			}
		}
		var extra []iptables.Step
		for i, rule := range task.seen.Table.Rules(chain) {
			n, wanted := left[rule.Key()]
			switch {
			case !wanted:
			case n > 0:
				left[rule.Key()]--
			default:
				extra = append(extra, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
		slices.Reverse(extra)
		plan.steps.remove = append(plan.steps.remove, extra...)
	}
	if plan.scripted().script.Empty() {
		return nil
	}
	return plan
}
