package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// mergeChain plans to put the missing rules of a chain that many share between
// those that stand in it, and reports whether there are any. Who wrote there
// since the flush, such as a pod's host port, wrote its own only. Nothing that stands is
// touched, and the chain is not declared, for that would empty it: beside a writer
// whom no guard holds off, its rule must not be the price.
func mergeChain(task *tableTask, c rules.Chain, standing *rules.Chain, ownerRemoved map[string]bool, plan *tablePlan, s *section) bool {
	wanted := make([]rules.Jump, 0, len(c.Rules))
	for _, r := range c.Rules {
		wanted = append(wanted, rules.Jump{Chain: c.Name, Rule: r})
	}
	at := matchJumps(standing.Rules, wanted)
	var slots []slot
	for _, r := range standing.Rules {
		slots = append(slots, slot{rule: r})
	}
	last := lastResorts(c.Rules)
	fresh, next := false, 0
	for i, r := range c.Rules {
		if at[i] >= 0 {
			next = at[i] + 1
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
			next = len(slots)
		}
		slots = slices.Insert(slots, next, slot{rule: r, fresh: true})
		for j := range at {
			if at[j] >= next {
				at[j]++
			}
		}
		fresh, next = true, next+1
	}
	if !fresh {
		return false
	}
	merged := rules.Chain{Name: c.Name}
	for _, slot := range slots {
		merged.Rules = append(merged.Rules, slot.rule)
	}
	plan.merged = append(plan.merged, merged)
	s.jump = append(s.jump, stepsFor(c.Name, slots)...)
	return true
}

// lastResorts returns the index from which on a chain's rules are its last word
// on all that came so far: Docker drops at the end of a chain what none of the
// rules above accepts, and others return. New rules are inserted above these.
func lastResorts(list []rules.Rule) int {
	n := len(list)
	for n > 0 && (list[n-1].Target == "DROP" || list[n-1].Target == "REJECT" || list[n-1].Spec == "-j RETURN") {
		n--
	}
	return n
}

// shared reports whether a chain that holds rules after a flush may lack others'.
func (t tableTask) shared(chain string) bool {
	return t.want.Piecewise != nil && t.want.Piecewise(chain) && t.finding.MarkLost && t.finding.Verdict != canary.Replaced
}
