package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// mergeChain plans to insert the missing rules of a shared chain between the rules in force. An
// owner that wrote to it since the flush, such as a CNI plugin for one pod's host port, wrote only
// its own rules. Rules in force stay, and the chain is not declared, because a declaration would
// empty it. So a writer that ignores every guard loses no rule.
func mergeChain(task tableTask, c rules.Chain, lines []*line, plan *tablePlan) {
	stay, stale := task.standingIn(c)
	for _, i := range slices.Backward(stale) { // the last index first, so that the others stay true
		plan.steps.remove = append(plan.steps.remove, iptables.Step{Verb: iptables.Delete, Chain: c.Name, Index: i + 1})
	}
	l := newLayout(stay, c.Rules)
	l.merge(c.Rules, func(i int) (rules.Rule, bool) { return lines[i].writable, !lines[i].removed && lines[i].held == nil })
	plan.hold(lines)
	plan.mean(c, lines)
	steps := stepsFor(c.Name, l.slots)
	if len(steps)+len(stale) == 0 {
		return
	}
	plan.merged = append(plan.merged, rules.Chain{Name: c.Name, Rules: l.rules()})
	plan.steps.jump = append(plan.steps.jump, steps...)
}

// merge inserts the missing rules of a chain, each behind all rules that preceded it. A rule that
// decides about all other packets is placed behind the rules that others added, unless a rule is in
// force that it preceded. pick returns the i-th of the wanted rules as it is inserted, and whether
// it is inserted.
func (l *layout) merge(wanted []rules.Rule, pick func(i int) (rules.Rule, bool)) {
	last, stands := lastResorts(wanted), len(wanted)
	for stands > 0 && l.at[stands-1] < 0 {
		stands--
	}
	merged := make([]slot, 0, len(l.slots)+len(wanted))
	next := 0 // how many of the standing rules are in merged
	behind := func(n int) {
		if n > next {
			merged, next = append(merged, l.slots[next:n]...), n
		}
	}
	for i := range wanted {
		if l.at[i] >= 0 {
			behind(l.at[i] + 1)
			continue
		}
		r, picked := pick(i)
		if !picked {
			continue
		}
		if i >= max(last, stands) {
			behind(len(l.slots))
		}
		merged = append(merged, slot{rule: r, fresh: true})
	}
	behind(len(l.slots))
	l.slots = merged
}

// rules returns the rules of the layout in their order: the chain as the replay will leave it.
func (l *layout) rules() []rules.Rule {
	list := make([]rules.Rule, len(l.slots))
	for i, slot := range l.slots {
		list[i] = slot.rule
	}
	return list
}

// lacksAny reports whether rules are missing from a shared chain that its owner did not remove.
// Then chooseChains has the chain merged.
func lacksAny(standing, wanted []rules.Rule, ownerRemoved map[string]bool) bool {
	at := newLayout(standing, wanted).at
	for i, r := range wanted {
		if at[i] < 0 && !ownerRemoved[r.Target] {
			return true
		}
	}
	return false
}

// returns is the rule that ends a chain for each packet.
var returns = rules.Rule{Spec: "-j RETURN", Target: "RETURN"}

// lastResorts returns the index of the first of the rules at a chain's end that decide about
// all other packets. Docker ends a chain with a DROP of all packets that no rule above accepts;
// others end with RETURN. merge inserts missing rules above these.
func lastResorts(list []rules.Rule) int {
	n := len(list)
	for n > 0 && (list[n-1].Target == "DROP" || list[n-1].Target == "REJECT" || list[n-1].Is(returns)) {
		n--
	}
	return n
}

// shared reports whether many owners write rules of their own to a chain. After a flush such a
// chain may hold the rules of one owner and lack those of others.
func (t tableTask) shared(chain string) bool {
	return t.want.Piecewise != nil && t.want.Piecewise(chain) && t.finding.MarkLost && t.finding.Verdict != canary.Replaced
}

// takenRules returns the rules of Finding.Taken by chain: a purge took them, or they are of
// robbed containers.
func takenRules(list []rules.Jump) map[string][]rules.Rule {
	taken := map[string][]rules.Rule{}
	for _, h := range list {
		taken[h.Chain] = append(taken[h.Chain], h.Rule)
	}
	return taken
}

// withTaken returns a chain with the rules that were taken from it back among the rules in
// force. chooseChains plans the chain so. Other rules of the generation may have been removed
// by their owner since.
func withTaken(c rules.Chain, standing, taken []rules.Rule) rules.Chain {
	short := rules.Chain{Name: c.Name}
	for _, r := range c.Rules {
		if slices.ContainsFunc(taken, r.Equal) || slices.ContainsFunc(standing, r.Equal) {
			short.Rules = append(short.Rules, r)
		}
	}
	return short
}
