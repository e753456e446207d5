package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// mergeChain plans to insert the missing rules of a shared chain between those that stand in it,
// and reports whether there are any. An owner that wrote to it since the flush, such as a CNI
// plugin for one pod's host port, wrote only its own rules. Rules that stand are not touched, and
// the chain is not declared, because a declaration would empty it. So a writer that ignores every
// guard loses no rule.
func mergeChain(task *tableTask, c rules.Chain, standing *rules.Chain, ownerRemoved map[string]bool, plan *tablePlan) bool {
	l := newLayout(standing.Rules, c.Rules)
	last := lastResorts(c.Rules)
	next := 0
	for i, r := range c.Rules {
		if l.at[i] >= 0 {
			next = l.at[i] + 1
			continue
		}
		if ownerRemoved[r.Target] {
			continue
		}
		r, ok := task.admit(c.Name, r, plan)
		if !ok {
			continue
		}
		if i >= last {
			next = len(l.slots)
		}
		l.insert(next, r)
		next++
	}
	steps := stepsFor(c.Name, l.slots)
	if len(steps) == 0 {
		return false
	}
	merged := rules.Chain{Name: c.Name}
	for _, slot := range l.slots {
		merged.Rules = append(merged.Rules, slot.rule)
	}
	plan.merged = append(plan.merged, merged)
	plan.steps.jump = append(plan.steps.jump, steps...)
	return true
}

// lastResorts returns the index of the rules at a chain's end that decide about all other packets.
// Docker ends a chain with a DROP for what no rule above accepts; others end with RETURN. Missing
// rules are inserted above these.
func lastResorts(list []rules.Rule) int {
	n := len(list)
	for n > 0 && (list[n-1].Target == "DROP" || list[n-1].Target == "REJECT" || list[n-1].Spec == "-j RETURN") {
		n--
	}
	return n
}

// shared reports whether many owners write rules of their own to a chain. After a flush such a
// chain may hold the rules of one owner and lack those of others.
func (t tableTask) shared(chain string) bool {
	return t.want.Piecewise != nil && t.want.Piecewise(chain) && t.finding.MarkLost && t.finding.Verdict != canary.Replaced
}

// takenRules returns the rules that were taken from each chain.
func takenRules(list []rules.Jump) map[string][]rules.Rule {
	taken := map[string][]rules.Rule{}
	for _, h := range list {
		taken[h.Chain] = append(taken[h.Chain], h.Rule)
	}
	return taken
}

// putBackTaken plans to put the rules that were taken from a chain back among those that stand in
// it. Others that the generation has may have been removed by their owner since.
func putBackTaken(task *tableTask, c rules.Chain, standing *rules.Chain, taken []rules.Rule, plan *tablePlan) {
	var among []rules.Rule
	if standing != nil {
		among = standing.Rules
	}
	short := rules.Chain{Name: c.Name}
	for _, r := range c.Rules {
		if slices.ContainsFunc(taken, r.Equal) || slices.ContainsFunc(among, r.Equal) {
			short.Rules = append(short.Rules, r)
		}
	}
	if standing == nil {
		writeChain(task, short, nil, plan)
		return
	}
	mergeChain(task, short, standing, nil, plan)
}
