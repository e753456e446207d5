package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A detour is a way of packets through a chain that the complete rules do not have. Rules that mark
// packets are lost, so rules that look for the mark match too little or too much:
//
//   - A DROP matches too little, and may let packets pass. The rules behind it wait as if it were
//     lost, if they may let packets in.
//   - A rule that lets packets in where a mark is not set matches too much, and waits.
//   - A RETURN matches too little, and rules behind it meet packets that they never met: the same
//     rules wait. Or it matches too much: the chain lacks the rules behind it.
//
// The masquerade's mark makes no rule wait: without it KUBE-POSTROUTING returns too many packets,
// and masquerades none of them.
type detour struct {
	*gapSearch
	chain string
	meet  []rules.Rule // behind these, packets meet rules that they never met
	skip  []rules.Rule // behind these, packets skip rules that they met
	// lacks are the fates of the rules that packets skip.
	lacks fate
	// reason is why a rule waits behind the first lines of the chain; searched counts these lines.
	reason   string
	searched int
}

// before returns the fates that packets lose, because of marks, if they match a rule. A missing
// rule matches no packet. The rule waits if it may let in packets that these fates kept out.
func (d *detour) before(l *line) fate {
	if l.removed || l.gone || l.missing() {
		return 0
	}
	r := l.rule
	for _, by := range d.skip {
		d.lacks |= d.of(r)
		d.unmark(d.marksBy(r, by))
	}
	by := d.meet
	if _, more := d.lostMarks.Misleads(r); more {
		by = append(slices.Clip(by), r)
	}
	if len(by) == 0 {
		return 0
	}
	for _, by := range by {
		d.unmark(d.marksBy(r, by).Gained())
	}
	return keeps
}

// behind returns the fates that packets lose, because of marks, behind a rule in force. It
// notes a rule that ends the chain for too few or too many packets, for the lines behind.
func (d *detour) behind(r rules.Rule) fate {
	less, more := d.lostMarks.Misleads(r)
	ends := r.Target == "RETURN" || d.leaves(r)
	if less && ends {
		d.meet = append(d.meet, r)
	}
	if more && ends {
		d.skip = append(d.skip, r)
	}
	if !less {
		return 0
	}
	d.unmark(d.marksBy(r, r))
	return d.of(r)
}

// cause returns the reason of a rule that waits only because of marks. It names the first rule
// of d.meet, or r: that rule looks for the mark.
func (d *detour) cause(r rules.Rule) string {
	if len(d.meet) > 0 {
		r = d.meet[0]
	}
	return fmt.Sprintf("waits, because %q looks for the mark of a missing rule", r.Label())
}

// marksBy returns how marks may differ because packets meet or skip a rule. They do so because
// another rule, by, looks for a mark that they lack, or have too much. If that is a single bit,
// they differ in it already, and a MARK that they meet or skip adds nothing. KUBE-POSTROUTING, for
// example, clears the masquerade's bit only where it was set.
func (s *gapSearch) marksBy(r, by rules.Rule) rules.MarkLoss {
	loss := s.marks(r)
	if r.Target == "MARK" {
		loss = loss.Without(by.MarkBit())
	}
	return loss
}

// lose counts a rule as lost, and returns its fates.
func (d *detour) lose(r rules.Rule) fate {
	d.unmark(d.marks(r))
	return d.of(r)
}

// unmark adds differences of marks, and has each chain searched again if one is new. Other
// tables get the difference, too, unless no rule there looks at the packet later.
func (d *detour) unmark(loss rules.MarkLoss) {
	if all := d.lostMarks.And(loss); all != d.lostMarks {
		d.lostMarks, d.grown = all, true
	}
	if !d.atTheEnd(d.chain) {
		d.passedOn = d.passedOn.And(loss)
	}
}

// planTables plans the writes to the tables of a family. If rules are lost that mark packets, it
// plans again with that loss: rules of each table may look for their marks.
func (r run) planTables(t *familyRun, tasks []tableTask, misfits map[iptables.Place]error) []tablePlan {
	for lost := (rules.MarkLoss{}); ; {
		var plans []tablePlan
		t.misfits = map[rules.TableName]error{}
		for _, task := range tasks {
			task.lostMarks = lost
			if plan := r.action.plan(task, t.nonce); plan != nil {
				plans = append(plans, *plan)
				if err := misfit(*plan, misfits); err != nil {
					t.misfits[task.table] = fmt.Errorf("%s waits: %w", t.family.Table(task.table), err)
				}
			}
		}
		if t.staged {
			sortByStage(plans)
		}
		plans = t.withoutSkipped(plans)
		before := lost
		for _, task := range tasks {
			i := slices.IndexFunc(plans, func(p tablePlan) bool { return p.table == task.table })
			if i >= 0 && plans[i].replay {
				lost = lost.And(plans[i].lostMarks)
			} else {
				lost = lost.And(task.missingMarks())
			}
		}
		if lost == before || !r.action.writesRules || len(plans) == 0 {
			return plans
		}
	}
}

// missingMarks returns how marks of packets may differ because rules of a table are quarantined
// or lost, and no rules are written to it. planTables plans the other tables with it.
func (t *tableTask) missingMarks() rules.MarkLoss {
	var lost rules.MarkLoss
	f := t.fates()
	if !t.finding.Verdict.Loss() {
		for _, h := range t.quarantined {
			if !f.atTheEnd(h.Chain) {
				lost = lost.And(f.marks(h.Rule))
			}
		}
		return lost
	}
	lacking := func(chain string, standing, wanted []rules.Rule) {
		if f.atTheEnd(chain) {
			return
		}
		for i, at := range newLayout(standing, wanted).at {
			if at < 0 {
				lost = lost.And(f.marks(wanted[i]))
			}
		}
	}
	for _, c := range t.want.Section.Chains {
		if standing := t.seen.Table.Rules(c.Name); !rules.EqualRules(standing, c.Rules) {
			lacking(c.Name, standing, c.Rules)
		}
	}
	for _, chain := range t.want.Section.JumpChains(t.table) {
		lacking(chain, t.seen.Table.Rules(chain), jumpRulesIn(t.want.Section.Jumps, chain))
	}
	return lost
}
