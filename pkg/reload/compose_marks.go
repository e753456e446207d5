package reload

import (
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// planMarks replaces the canary and all witnesses by new ones with this nonce. The proof then
// expects these. Witnesses are in the chains that have jumps in task.want.
func planMarks(task tableTask, plan *tablePlan, nonce canary.Nonce) {
	s := &plan.steps
	removeWitnesses(task.seen.Table, s)
	plan.want.Mark = canary.Mark{Nonce: nonce, Witnessed: task.want.Section.WitnessedChains(task.table)}
	s.declare = append(s.declare, task.want.CanaryChain)
	if task.seen.Table.Chain(canary.DrillChain) != nil { // a drill is over
		s.declare = append(s.declare, canary.DrillChain)
		s.drop = append(s.drop, iptables.Step{Verb: iptables.Drop, Chain: canary.DrillChain})
	}
	for _, chain := range plan.want.Mark.Witnessed {
		s.mark = append(s.mark, appendRule(chain, nonce.Witness()))
	}
	s.mark = append(s.mark, appendRule(task.want.CanaryChain, nonce.Rule()))
}

// removeWitnesses deletes all witnesses of any nonce from the built-in chains of a table; nil:
// there is no table.
func removeWitnesses(t *rules.Table, s *section) {
	if t == nil {
		return
	}
	for _, c := range t.Chains {
		if !rules.Builtin(t.Name, c.Name) {
			continue
		}
		for _, r := range c.Rules {
			if canary.IsWitness(r) {
				s.remove = append(s.remove, deleteRule(c.Name, r))
			}
		}
	}
}

// rotate plans marks with a new nonce for an intact or changed table, for Rotate.
func rotate(task tableTask, nonce canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed || task.want.Mark.Nonce == "" {
		return nil
	}
	if task.want.Needless(task.seen) {
		return composeWithdrawal(task)
	}
	task.want.Section.Jumps = task.seen.Section.Jumps
	return composeRotation(task, nonce)
}
