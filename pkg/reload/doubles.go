package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// removeDoubles plans to delete the copies of the task's doubled jumps that exceed the generation.
func removeDoubles(task tableTask, _ canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed {
		return nil
	}
	script := composeRemoveDoubles(task, task.doubled)
	if script.Empty() {
		return nil
	}
	return &tablePlan{table: task.table, mark: task.want.Mark, script: script}
}

// composeRemoveDoubles returns the script that deletes surplus copies of jumps. It deletes by
// index, the last one first, so that the remaining indexes stay true.
func composeRemoveDoubles(task tableTask, jumps []rules.Jump) iptables.Script {
	script := iptables.Script{Table: task.table}
	if task.seen.Err != nil || task.seen.Table == nil {
		return script
	}
	for _, chain := range task.want.Section.JumpChains(task.table) {
		left := map[string]int{}
		for _, h := range task.want.Section.Jumps {
			if h.Chain == chain && slices.ContainsFunc(jumps, h.Same) {
				left[h.Rule.Spec]++
			}
		}
		c := task.seen.Table.Chain(chain)
		if c == nil {
			continue
		}
		var extra []iptables.Step
		for i, rule := range c.Rules {
			n, wanted := left[rule.Spec]
			switch {
			case !wanted:
			case n > 0:
				left[rule.Spec]--
			default:
				extra = append(extra, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
		slices.Reverse(extra)
		script.Steps = append(script.Steps, extra...)
	}
	return script
}
