package reload

import (
	"cmp"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// chosenChains are the chains of the generation that a plan writes. The search for gaps may still
// remove some of their rules from the plan.
type chosenChains struct {
	write   []rules.Chain // as a whole
	merge   []rules.Chain // only the rules that are missing
	leftOut []rules.Chain // lost, and never written
	// doubtful are empty or missing chains that count neither as lost nor as removed by their
	// owner.
	doubtful []rules.Chain
	// ownerRemoved are chains that their owner removed since the flush, and with them the rules
	// that lead there.
	ownerRemoved map[string]bool
	lines        map[string][]*line // by chain; nil as long as nothing is missing
}

// chooseChains chooses for composeReplay which chains of the generation are written, merged or
// skipped. It notes in plan.skipped the chains that their owner wrote after the flush.
func chooseChains(task tableTask, plan *tablePlan) *chosenChains {
	chosen := &chosenChains{ownerRemoved: make(map[string]bool, len(task.finding.Released))}
	var lost map[string]bool
	if task.finding.MarkLost {
		chosen.write = make([]rules.Chain, 0, len(task.want.Section.Chains))
	} else {
		lost = nameSet(task.finding.Missing, task.finding.Emptied)
	}
	for _, name := range task.finding.Released {
		chosen.ownerRemoved[name] = !task.claimed(name)
	}
	taken := takenRules(task.finding.Taken)
	for _, c := range task.want.Section.Chains {
		standing := task.seen.Table.Chain(c.Name)
		switch {
		case len(taken[c.Name]) > 0 && !lost[c.Name]:
			c = withTaken(c, task.seen.Table.Rules(c.Name), taken[c.Name])
			if standing != nil {
				chosen.merge = append(chosen.merge, c)
				continue
			}
			chosen.write = append(chosen.write, c)
			continue
		case chosen.ownerRemoved[c.Name]:
			continue
		case c.LeftOut():
			if (task.finding.MarkLost || lost[c.Name]) && (standing == nil || len(standing.Rules) == 0) {
				chosen.leftOut = append(chosen.leftOut, c)
			}
			continue
		case standing.LeftOut() && task.finding.Verdict != canary.Replaced:
			continue // it holds rules of its owner that canaryd did not read
		case task.misread.chains[c.Name] != nil:
		case task.readmit[c.Name] && !task.claimed(c.Name):
			// Rules in force are not written again: its owner may have put back a rule that canaryd
			// cannot write.
			chosen.merge = append(chosen.merge, c)
			continue
		case task.readmit[c.Name]:
		case standing != nil && rules.EqualRules(standing.Rules, c.Rules):
			continue
		case (task.finding.Verdict == canary.Replaced || task.claimed(c.Name)) && !task.want.Section.IsLedTo(c.Name):
		case standing != nil && len(standing.Rules) > 0:
			merges := task.shared(c.Name) && lacksAny(standing.Rules, c.Rules, chosen.ownerRemoved)
			switch {
			case merges:
				chosen.merge = append(chosen.merge, c)
			case task.finding.MarkLost:
				plan.skipped = append(plan.skipped, c.Name)
			}
			continue
		case !task.finding.MarkLost && !lost[c.Name]:
			if len(c.Rules) > 0 {
				chosen.doubtful = append(chosen.doubtful, c)
			}
			continue
		}
		chosen.write = append(chosen.write, c)
	}
	return chosen
}

// keepStanding has chains merged that hold rules and would be written as a whole. Such a chain may
// hold a rule that canaryd cannot write, and rules that would wait behind a missing one. To write
// the chain without them would remove rules that no flush removed. The chains of a declared source
// are not kept, nor are chains with a misread rule.
func (c *chosenChains) keepStanding(task *tableTask) {
	c.write = slices.DeleteFunc(c.write, func(chain rules.Chain) bool {
		standing := task.seen.Table.Chain(chain.Name)
		if standing == nil || standing.LeftOut() || len(standing.Rules) == 0 || task.claimed(chain.Name) || task.misread.chains[chain.Name] != nil {
			return false
		}
		c.merge = append(c.merge, chain)
		return true
	})
}

// standingIn returns the rules that stay in a merged chain, and the indexes of the rules to
// delete. It deletes rules only in a chain that must equal the generation's: rules that the
// generation lacks, or has in another order. mergeChain plans both.
func (t *tableTask) standingIn(c rules.Chain) (stay []rules.Rule, stale []int) {
	standing := t.seen.Table.Rules(c.Name)
	if !t.mustEqual(c.Name) {
		return standing, nil
	}
	stays := longestInOrder(newLayout(standing, c.Rules).at)
	for i, r := range standing {
		if stays[i] {
			stay = append(stay, r)
		} else {
			stale = append(stale, i)
		}
	}
	return stay, stale
}

// longestInOrder returns the longest rising sequence among the numbers of a list; it ignores
// -1. standingIn keeps these rules in force, and deletes the others.
func longestInOrder(list []int) map[int]bool {
	var ends []int                   // the index in list of the last number of the best run of each length
	before := make([]int, len(list)) // the index of the number before it in its run
	for i, n := range list {
		if n < 0 {
			continue
		}
		at, _ := slices.BinarySearchFunc(ends, n, func(end, n int) int { return cmp.Compare(list[end], n) })
		if before[i] = -1; at > 0 {
			before[i] = ends[at-1]
		}
		ends = slices.Replace(ends, at, min(at+1, len(ends)), i)
	}
	longest := map[int]bool{}
	if len(ends) > 0 {
		for i := ends[len(ends)-1]; i >= 0; i = before[i] {
			longest[list[i]] = true
		}
	}
	return longest
}

// linesOf returns the lines of a chain of the generation. Lines whose rules are in standing are
// in force. ownerRemoved has chains to which no rule is written; it may be nil.
func (t *tableTask) linesOf(c rules.Chain, standing []rules.Rule, ownerRemoved map[string]bool) []*line {
	at := newLayout(standing, c.Rules).at
	all := make([]line, len(c.Rules))
	lines := make([]*line, len(c.Rules))
	for i, r := range c.Rules {
		l := &all[i]
		lines[i] = l
		*l = line{rule: r, writable: r, stands: at[i] >= 0, removed: at[i] < 0 && ownerRemoved[r.Target]}
		if !l.stands && !l.removed && t.unwritable(c.Name, r) {
			l.writable, l.weakened, l.held = t.admit(c.Name, r)
		}
	}
	return lines
}

// readLines makes c.lines: a line for each rule of all chains of the table as they would be
// after the replay, also of chains that stay as they are. A line says whether its rule is in
// force, lost or quarantined. findGaps searches the lines for rules that let in too much, and
// planChains writes them.
func (c *chosenChains) readLines(task *tableTask) {
	c.lines = map[string][]*line{}
	for _, chain := range c.write {
		c.lines[chain.Name] = task.linesOf(chain, nil, c.ownerRemoved)
	}
	for _, chain := range c.merge {
		stay, _ := task.standingIn(chain)
		c.lines[chain.Name] = task.linesOf(chain, stay, c.ownerRemoved)
	}
	for _, chain := range c.leftOut {
		c.lines[chain.Name] = task.linesOf(chain, nil, nil)
	}
	for _, chain := range c.doubtful {
		for _, r := range chain.Rules {
			c.lines[chain.Name] = append(c.lines[chain.Name], &line{rule: r, gone: true})
		}
	}
	chosen := nameSet(rules.ChainNames(c.write), rules.ChainNames(c.merge), rules.ChainNames(c.leftOut), rules.ChainNames(c.doubtful), rules.BuiltinChains(task.table))
	if task.seen.Table != nil {
		for _, chain := range task.seen.Table.Chains {
			if chosen[chain.Name] {
				continue
			}
			for _, r := range chain.Rules {
				c.lines[chain.Name] = append(c.lines[chain.Name], &line{rule: r, stands: true})
			}
		}
	}
	for _, h := range task.quarantined {
		if !chosen[h.Chain] { // the plan does not write this chain, so the rule stays quarantined
			h.Waits = false
			c.lines[h.Chain] = append(c.lines[h.Chain], &line{rule: h.Rule, held: &h})
		}
	}
}

// anyUnwritable reports whether a rule of the chains to write cannot be written as it is. Then
// composeReplay searches for gaps. It runs for each of 16,000 chains, so it creates no closure.
func (c *chosenChains) anyUnwritable(task *tableTask) bool {
	for _, list := range [][]rules.Chain{c.write, c.merge} {
		for _, chain := range list {
			for _, r := range chain.Rules {
				if task.unwritable(chain.Name, r) {
					return true
				}
			}
		}
	}
	return len(c.leftOut) > 0 || len(c.doubtful) > 0
}

// chosenJumps are the jumps that a built-in chain has after a replay, with a line for each.
type chosenJumps struct {
	wanted []rules.Jump
	gone   []bool // for each jump: it leads to a missing chain
	lines  []*line
	all    []*line // lines, and the other rules of the chain, in their order
}

// chooseJumps chooses for composeReplay which jumps are put back in each built-in chain. A jump
// to a missing chain that the plan does not write is left out.
func chooseJumps(task tableTask, chains *chosenChains) map[string]*chosenJumps {
	written := func(name string) bool {
		return slices.ContainsFunc(chains.write, func(c rules.Chain) bool { return c.Name == name })
	}
	chosen := map[string]*chosenJumps{}
	held := heldRules(task.quarantined)
	for _, chain := range task.want.Section.JumpChains(task.table) {
		if task.seen.Table.Chain(chain).LeftOut() {
			continue // canaryd did not read the chain, so no place in it is known
		}
		jumps := &chosenJumps{}
		for _, h := range task.want.Section.Jumps {
			if h.Chain != chain {
				continue
			}
			_, misread := task.unavailable.misread[h.Rule.Key()]
			ours := misread || held.has(h.Chain, h.Rule)
			lost := slices.ContainsFunc(task.finding.Jumps, h.Same) || task.claimed(h.Into()) || ours
			if ours && !task.mustEqual(h.Into()) && canary.Superseded(task.want.Section, task.seen.Table.Rules(chain), h) {
				lost = false // its owner decides
			}
			// Its owner may have removed the chain right before the flush. One jump to a missing
			// chain would make the kernel refuse the whole table.
			leads := h.Named || task.seen.Table.Chain(h.Rule.Target) != nil || written(h.Rule.Target) ||
				slices.Contains(task.want.Section.DependsOn, h.Into())
			gone := lost && !leads && !chains.ownerRemoved[h.Into()]
			if lost && leads || gone || stands(task.seen.Table, h) {
				jumps.wanted, jumps.gone = append(jumps.wanted, h), append(jumps.gone, gone)
			}
		}
		jumps.lines = task.linesOf(rules.Chain{Name: chain, Rules: jumpRulesIn(jumps.wanted, chain)}, standingRules(task, chain), nil)
		for i, l := range jumps.lines {
			if l.gone = jumps.gone[i] && !l.stands; l.gone {
				l.held = nil
			}
		}
		chosen[chain] = jumps
	}
	return chosen
}

// order puts the jumps among the other rules of their chain, each at its place after the
// replay. findGaps needs that order: a rule waits only behind a gap.
func (c *chosenJumps) order(standing []rules.Rule, chain string) {
	layout := layoutOf(standing, c.wanted, chain)
	c.all = make([]*line, len(layout.slots))
	for i, slot := range layout.slots {
		c.all[i] = &line{rule: slot.rule, stands: true}
	}
	for i, at := range layout.at {
		c.all[at] = c.lines[i]
	}
}

// lacksRules reports whether the plan ought to write a rule and cannot. If so, composeReplay
// searches for gaps, and makes rules behind them wait.
func (t *tableTask) lacksRules(chains *chosenChains, jumps map[string]*chosenJumps) bool {
	if len(t.quarantined) > 0 || chains.anyUnwritable(t) {
		return true
	}
	for _, list := range jumps {
		if slices.ContainsFunc(list.lines, func(l *line) bool { return l.held != nil || l.gone }) {
			return true
		}
	}
	return false
}
