package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Lost has the lost chains, rules and jumps of a table.
type Lost struct {
	Chains []LostChain
	Rules  int // in chains and jumps
	Jumps  []rules.Jump
}

// Any reports whether anything but marks was lost.
func (l Lost) Any() bool { return l.Rules+len(l.Chains)+len(l.Jumps) > 0 }

// A LostChain is a protected chain as the generation has it, and the rules found in its place.
type LostChain struct {
	Name    string
	Was, Is []rules.Rule
	Stands  bool // the chain itself existed
}

// Apart returns the rules that only the generation has, and the rules that only the table has.
// Flush records list and count them. Declared sources may use other words than iptables-save:
// rules that differ as text are compared by their meaning.
func (c LostChain) Apart() (gone, instead []rules.Rule) {
	if len(c.Is) == 0 {
		return c.Was, nil
	}
	gone, instead = c.Was, c.Is
	for _, key := range []func(rules.Rule) string{rules.Rule.Label, rules.Rule.Meaning} {
		if len(gone) == 0 || len(instead) == 0 {
			break
		}
		was := gone
		gone, _ = apart(gone, instead, key)
		instead, _ = apart(instead, was, key)
	}
	return gone, instead
}

// apart splits a into the rules that b lacks and the rules that b also has. Rules with the same
// key are equal. Each rule of b counts once.
func apart(a, b []rules.Rule, key func(rules.Rule) string) (lacking, common []rules.Rule) {
	have := map[string]int{}
	for _, r := range b {
		have[key(r)]++
	}
	for _, r := range a {
		if k := key(r); have[k] > 0 {
			have[k]--
			common = append(common, r)
		} else {
			lacking = append(lacking, r)
		}
	}
	return lacking, common
}

// countLost returns the losses in the task's finding, for the flush record. A drill that took
// only the canary lost nothing.
func countLost(task tableTask) Lost {
	if task.finding.OnlyDrilled() {
		return Lost{}
	}
	lost := Lost{Jumps: task.finding.Jumps, Rules: len(task.finding.Jumps)}
	missing := nameSet(task.finding.Missing, task.finding.Emptied)
	lost.Chains = slices.Grow(lost.Chains, len(missing))
	for _, c := range task.want.Section.Chains {
		standing, gone := task.seen.Table.Chain(c.Name), missing[c.Name]
		if (task.finding.Verdict == canary.Replaced || task.claimed(c.Name)) && !gone && !task.want.Section.IsLedTo(c.Name) {
			gone = standing == nil || !rules.EqualRules(standing.Rules, c.Rules)
		}
		if gone {
			l := LostChain{Name: c.Name, Was: c.Rules, Is: task.seen.Table.Rules(c.Name), Stands: standing != nil}
			lost.Chains = append(lost.Chains, l)
			if !c.LeftOut() { // canaryd never read how many rules such a chain has
				gone, _ := l.Apart()
				lost.Rules += len(gone)
			}
		}
	}
	for name, list := range takenRules(task.finding.Taken) {
		if !missing[name] {
			lost.Chains = append(lost.Chains, LostChain{Name: name, Was: list, Stands: task.seen.Table.Chain(name) != nil})
			lost.Rules += len(list)
		}
	}
	return lost
}

// nameSet returns the names of all lists as a set, for look-ups. There may be 16,000 chains for
// 5,000 services.
func nameSet(lists ...[]string) map[string]bool {
	all := slices.Concat(lists...)
	set := make(map[string]bool, len(all))
	for _, name := range all {
		set[name] = true
	}
	return set
}

// changedPolicies returns the built-in chains whose policy differs from the generation's, in
// words, for TableResult.Policies.
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
