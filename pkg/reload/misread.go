package reload

import (
	"errors"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// errMisread is the reason of a rule whose text iptables-restore reads as another rule. iptables
// prints some rules in the words of another rule.
var errMisread = errors.New("iptables-restore makes another rule of its text")

// errOtherSet is the reason of a rule that the kernel took with another ipset than it names. Each
// time that the rule was written, the set was destroyed and made again between the look-up of its
// number and the commit.
var errOtherSet = errors.New("its ipset is made again all the time, and the kernel took the rule with another one")

// otherSetTries is how often a run writes a rule that the kernel took with another ipset.
const otherSetTries = 3

// misread has the chains and rules that a write left otherwise than planned, while no other process
// wrote. They are canaryd's own fault, so they are never learned.
type misread struct {
	chains map[string][]rules.Rule // chains of the plan, as the proof saw them
	strays map[string][]rules.Rule // rules that the write added to chains with rules of others
	jumps  []rules.Jump            // planned jumps in whose place a stray with another ipset is in force
}

func (m misread) empty() bool { return len(m.chains)+len(m.strays) == 0 }

// standing returns the part of m that a later read still shows. Later changes are another
// process's decision. tasks has this part judged as a loss, so that a replay removes it.
func (m misread) standing(t *rules.Table) misread {
	left := misread{chains: map[string][]rules.Rule{}, strays: map[string][]rules.Rule{}}
	for name, list := range m.chains {
		if c := t.Chain(name); c != nil && rules.EqualRules(c.Rules, list) {
			left.chains[name] = list
		}
	}
	for name, list := range m.strays {
		if _, there := apart(list, t.Rules(name), rules.Rule.Meaning); len(there) > 0 {
			left.strays[name] = there
		}
	}
	for _, h := range m.jumps {
		if len(left.strays[h.Chain]) > 0 {
			left.jumps = append(left.jumps, h)
		}
	}
	return left
}

// judge returns the finding of a table with a misread rule: it is a loss, so that a replay
// corrects it. An unreadable table keeps its finding.
func (m misread) judge(finding canary.Finding) canary.Finding {
	if m.empty() || finding.Verdict == canary.Unknown {
		return finding
	}
	finding.Emptied = union(finding.Emptied, slices.Collect(maps.Keys(m.chains)))
	for _, h := range m.jumps {
		if !slices.ContainsFunc(finding.Jumps, func(o rules.Jump) bool { return o.Chain == h.Chain && o.Rule == h.Rule }) {
			finding.Jumps = append(slices.Clip(finding.Jumps), h)
		}
	}
	if !finding.Verdict.Loss() {
		finding.Verdict = canary.Emptied
	}
	return finding
}

// misreadBy compares a table after a write with the plan. bad are the rules from which
// iptables-restore made others, or none. Both are empty if the write changed nothing at all: then
// one line may have prevented all others, and only trials find it. Claimed chains do not count:
// their rules are in their author's words, and iptables may print them in a form that no comparison
// knows.
func (p tablePlan) misreadBy(after *rules.Table, claimed func(chain string) bool) (left misread, bad []rules.Rule) {
	if claimed == nil {
		claimed = func(string) bool { return false }
	}
	left = misread{chains: map[string][]rules.Rule{}, strays: map[string][]rules.Rule{}}
	changed := false
	for _, c := range p.wrote {
		standing := after.Chain(c.Name)
		if standing == nil {
			continue
		}
		before := p.seen.Chain(c.Name)
		changed = changed || before == nil || !rules.EqualRules(before.Rules, standing.Rules)
		if claimed(c.Name) || rules.EqualRules(standing.Rules, c.Rules) {
			continue
		}
		left.chains[c.Name] = standing.Rules
		lacks := rules.OnlyIn(c.Rules, standing.Rules)
		if len(lacks) == 0 { // another order, or rules that canaryd did not write
			lacks = c.Rules
		}
		bad = append(bad, lacks...)
	}
	added := map[string][]rules.Rule{} // the rules that the plan adds to chains with other rules
	ofClaimed := map[string]bool{}     // chains whose strays may be a declared jump in other words
	for _, h := range p.jumps {
		added[h.Chain] = append(added[h.Chain], h.Rule)
		ofClaimed[h.Chain] = ofClaimed[h.Chain] || claimed(h.Into())
	}
	for _, c := range p.merged {
		added[c.Name] = rules.OnlyIn(c.Rules, p.seen.Rules(c.Name))
	}
	for name, list := range added {
		if claimed(name) || ofClaimed[name] {
			continue
		}
		fresh := rules.OnlyIn(withoutMarks(after.Rules(name)), p.seen.Rules(name))
		changed = changed || len(fresh) > 0
		bad = append(bad, rules.OnlyIn(list, fresh)...)
		if strays := rules.OnlyIn(fresh, list); len(strays) > 0 {
			left.strays[name] = strays
		}
	}
	for _, h := range p.jumps {
		if slices.Contains(bad, h.Rule) && p.tookOtherSet(h.Rule, left) {
			left.jumps = append(left.jumps, h)
		}
	}
	// A second write may leave the rules that the first one left.
	changed = changed || slices.ContainsFunc(bad, func(r rules.Rule) bool { return p.tookOtherSet(r, left) })
	if !changed || len(bad) == 0 {
		return misread{}, nil
	}
	return left, bad
}

// noteMisread removes the misread rules of the plans from the writes of this run, and reports
// whether there are new ones. If so, bisectSilent has the family tried again.
func (t *familyRun) noteMisread(plans []tablePlan) (found bool) {
	for _, plan := range plans {
		tr := t.result.Tables[plan.table]
		if tr.misread.empty() {
			continue
		}
		list := t.misreadIn(plan.table)
		for _, r := range tr.misreadRules {
			_, known := list[r.Key()]
			found = found || !known
			if !plan.tookOtherSet(r, tr.misread) {
				list[r.Key()] = errMisread.Error()
			} else if !t.triesAgain(plan.table, r) {
				list[r.Key()] = errOtherSet.Error()
			}
		}
		t.memory.misread = tableid.With(t.memory.misread, t.family.Table(plan.table), tr.misread)
		if t.earlier == nil {
			t.earlier = map[rules.TableName]TableResult{}
		}
		t.earlier[plan.table] = tr.after(t.earlier[plan.table])
	}
	return found
}

// tookOtherSet reports whether the kernel took a rule of the plan with another ipset: left has
// an unplanned rule that differs only in ipsets. Such a rule is written again.
func (p tablePlan) tookOtherSet(r rules.Rule, left misread) bool {
	sets := r.Needs().Sets
	if len(sets) == 0 {
		return false
	}
	isOther := func(s rules.Rule) bool {
		others := s.Needs().Sets
		return s.Target == r.Target && len(others) == len(sets) && !slices.Equal(others, sets)
	}
	for _, c := range p.wrote {
		if slices.ContainsFunc(rules.OnlyIn(left.chains[c.Name], c.Rules), isOther) {
			return true
		}
	}
	for _, list := range left.strays {
		if slices.ContainsFunc(list, isOther) {
			return true
		}
	}
	return false
}

// triesAgain reports whether a run is to write a rule once more that the kernel took with
// another ipset. The other ipset says nothing about the rule. The same write removes the wrong
// rule. After false, noteMisread has the rule left out.
func (t *familyRun) triesAgain(table rules.TableName, r rules.Rule) bool {
	if t.otherSet == nil {
		t.otherSet = map[rules.TableName]map[rules.Key]int{}
	}
	if t.otherSet[table] == nil {
		t.otherSet[table] = map[rules.Key]int{}
	}
	t.otherSet[table][r.Key()]++
	return t.otherSet[table][r.Key()] < otherSetTries
}

// noteMisreadIn makes the next writes of this run leave out the rules that a trial found
// misread. tryRules calls it after the trial of each table. A trial knows this reason only of
// rules that it tried alone and read back.
func (t *familyRun) noteMisreadIn(trial trial) {
	for rule, err := range trial.errs {
		if errors.Is(err, errMisread) {
			t.misreadIn(trial.plan.table)[rule] = err.Error()
		}
	}
}

// quarantine returns q, with the rules that the earlier writes of this run left out. plan
// judges the next read by it: these rules are not expected.
func (t *familyRun) quarantine(q Quarantine) Quarantine {
	for table, tr := range t.earlier {
		q = q.With(t.family.Table(table), tr.Quarantined)
	}
	return q
}

// misreadIn returns the misread rules of a table that this run knows, with their reasons.
// Callers add to it, and the next plan leaves these rules out.
func (t *familyRun) misreadIn(table rules.TableName) reasons {
	if t.misread == nil {
		t.misread = map[rules.TableName]reasons{}
	}
	if t.misread[table] == nil {
		t.misread[table] = reasons{}
	}
	return t.misread[table]
}

// after returns tr, with the findings and results of earlier writes of the same run. plan and
// proveOne call it, so that the report has the loss as it was found first.
func (tr TableResult) after(earlier TableResult) TableResult {
	if earlier.Finding.Verdict == "" {
		return tr
	}
	tr = tr.withEarlier(earlier)
	tr.Placed = slices.Concat(earlier.Placed, tr.Placed)
	tr.Meant = joinMeant(earlier.Meant, tr.Meant)
	tr.Finding, tr.Lost, tr.Policies, tr.Seen = earlier.Finding, earlier.Lost, earlier.Policies, earlier.Seen
	return tr
}

// withoutStrays returns the task of a table without its strays, and the steps that delete these.
// Strays are the rules that a misread text added to chains of others. The steps delete by index,
// because canaryd knows no text of the strays. The last index is deleted first, so that the others
// stay true. All other steps are planned as if the strays were gone, so these steps run first.
func (t tableTask) withoutStrays() (tableTask, []iptables.Step) {
	if len(t.misread.strays) == 0 || t.seen.Table == nil {
		return t, nil
	}
	var steps []iptables.Step
	var chains []rules.Chain
	jumps := slices.Clone(t.seen.Section.Jumps)
	for _, chain := range slices.Sorted(maps.Keys(t.misread.strays)) {
		left := slices.Clone(t.seen.Table.Rules(chain))
		for _, i := range slices.Backward(t.strayIndexes(chain)) {
			steps = append(steps, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			isJump := func(h rules.Jump) bool { return h.Chain == chain && h.Rule.Equal(left[i]) }
			if at := slices.IndexFunc(jumps, isJump); at >= 0 {
				jumps = slices.Delete(jumps, at, at+1)
			}
			left = slices.Delete(left, i, i+1)
		}
		chains = append(chains, rules.Chain{Name: chain, Rules: left})
	}
	t.seen.Table, t.seen.Section.Jumps = t.seen.Table.With(chains...), jumps
	return t, steps
}

// strayIndexes returns the indexes of the strays in a chain, in rising order, for
// withoutStrays. Of equal rules only as many count as there are strays.
func (t tableTask) strayIndexes(chain string) []int {
	left := slices.Clone(t.misread.strays[chain])
	var indexes []int
	for i, r := range t.seen.Table.Rules(chain) {
		if at := slices.IndexFunc(left, r.Equal); at >= 0 {
			left = slices.Delete(left, at, at+1)
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// removeFirst puts the steps of withoutStrays before all others. It drops those for a chain
// that the plan writes as a whole: that chain is empty by then.
func (p *tablePlan) removeFirst(steps []iptables.Step) {
	if len(steps) == 0 {
		return
	}
	written := nameSet(rules.ChainNames(p.wrote))
	steps = slices.DeleteFunc(steps, func(s iptables.Step) bool { return written[s.Chain] })
	p.steps.remove = append(steps, p.steps.remove...)
}

// misreadOf returns the misread rules of a list of quarantined rules. plan keeps them out of
// the next write, too.
func misreadOf(list []QuarantinedRule) reasons {
	found := reasons{}
	for _, h := range list {
		if h.Misread {
			found[h.Rule.Key()] = h.Reason
		}
	}
	return found
}

func withoutMarks(list []rules.Rule) []rules.Rule {
	return slices.DeleteFunc(slices.Clone(list), canary.IsMark)
}
