package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Lost counts what a table lost.
type Lost struct {
	Chains []string
	Rules  int
	Hooks  []rules.Hook
}

// countLost counts what the finding says is lost.
func countLost(task tableTask) Lost {
	lost := Lost{Hooks: task.finding.Hooks, Rules: len(task.finding.Hooks)}
	for _, c := range task.want.Section.Chains {
		standing := task.seen.Table.Chain(c.Name)
		gone := slices.Contains(task.finding.Missing, c.Name) || slices.Contains(task.finding.Emptied, c.Name)
		if (task.finding.Verdict == canary.Replaced || task.claimed(c.Name)) && !gone {
			gone = standing == nil || !rules.EqualRules(standing.Rules, c.Rules)
		}
		if gone {
			lost.Chains = append(lost.Chains, c.Name)
			lost.Rules += len(c.Rules)
		}
	}
	return lost
}

func changedPolicies(task tableTask) []string {
	var changed []string
	for _, chain := range rules.BuiltinChains(task.table) {
		was, is := task.want.Section.Policies[chain], task.seen.Section.Policies[chain]
		if was != "" && is != "" && was != is {
			changed = append(changed, fmt.Sprintf("%s %s: %s, was %s", task.table, chain, is, was))
		}
	}
	return changed
}
