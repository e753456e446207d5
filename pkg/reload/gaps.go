package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A gap is a rule that decides and cannot be put back. Without it a packet would meet rules that
// the complete rules keep it from. A missing RETURN leads to the MASQUERADE behind it, a missing
// DROP to an ACCEPT. A replay lets no packet in that both the complete rules and the flush kept
// out:
//
//   - In a protected chain all rules behind a gap wait.
//   - A chain with a gap returns packets that it decided about before. It may have kept such a
//     packet out. Then in each chain that leads there, the rules wait that may let the packet in.
//     The first of these rules is a gap too, and so on up to the built-in chain. After a lost
//     ACCEPT no rule of another chain waits. In nat an ACCEPT keeps a packet out, and no rule waits
//     after a lost translation.
//   - In a built-in chain jumps belong to many owners, and only jumps wait that may let a packet
//     in. A jump that is in force cannot wait, so the chains that it leads to wait instead, if they
//     are empty.
//   - A rule that marks packets lets them in or keeps them out by the rules that look for its mark.
//     These rules may be in any table of the family; see detour.
//
// A rule that waits is quarantined. It is put back in its order with the rule that it waits for.

// A line is one rule of a chain, with its place in a replay.
type line struct {
	rule     rules.Rule // as the generation or the kernel has it
	writable rules.Rule // as it is written
	weakened []QuarantinedRule
	stands   bool // it is in the kernel, and stays there
	removed  bool // it leads to a chain that its owner has removed
	gone     bool // a flush or its owner removed it; which one is not learned yet
	// held says why the rule is quarantined; nil if it is written, or in force.
	held *QuarantinedRule
}

// missing reports whether the rule cannot be put back.
func (l *line) missing() bool { return l.held != nil && !l.held.Waits }

// A gapSearch finds the rules of one table that wait.
type gapSearch struct {
	*fates
	lines map[string][]*line // of every chain
	// Each pass makes these again. lost are the fates that packets miss in a chain. unfit are
	// chains in force with a rule that ought to wait: no further rule may lead there.
	lost  map[string]fate
	unfit map[string]bool
	// lostMarks is how marks of packets may differ, because of all tables of the family. passedOn
	// is how they may differ in other tables, because of this one.
	lostMarks, passedOn rules.MarkLoss
	// waiting are chains from which no rule is written, with the reason. grown says that this pass
	// found another one.
	waiting map[string]string
	grown   bool
}

// findGaps quarantines the rules of a plan that wait. composeReplay calls it if the plan lacks
// rules, or if marks of packets differ. It returns how marks may differ in other tables after
// the plan.
func (t *tableTask) findGaps(chains *chosenChains, jumps map[string]*chosenJumps) rules.MarkLoss {
	chains.readLines(t)
	for chain, list := range jumps {
		list.order(standingRules(*t, chain), chain)
	}
	s := &gapSearch{fates: t.fates(), lines: chains.lines, lostMarks: t.lostMarks, waiting: map[string]string{}}
	for s.grown = true; s.grown; {
		s.grown, s.lost, s.unfit = false, map[string]fate{}, map[string]bool{}
		for _, list := range chains.lines {
			release(list)
		}
		for _, list := range jumps {
			release(list.all)
		}
		for chain := range chains.lines {
			s.chain(chain)
		}
		for chain, list := range jumps {
			s.builtin(chain, list.all)
		}
	}
	return s.passedOn
}

// release ends the wait of all waiting rules. Each pass of findGaps begins with it, and decides
// again.
func release(list []*line) {
	for _, l := range list {
		if l.held != nil && l.held.Waits {
			l.held = nil
		}
	}
}

// chain decides which rules of one chain wait, and returns the fates that packets miss there.
// Rules that lead to the chain may wait because of these. Each pass searches a chain once.
func (s *gapSearch) chain(name string) fate {
	if lost, known := s.lost[name]; known {
		return lost
	}
	s.lost[name] = 0 // the kernel takes no loop
	reason, lost := s.waiting[name], fate(0)
	list := s.lines[name]
	d := detour{gapSearch: s, chain: name}
	for i, l := range list {
		inside := s.chain(l.rule.Target)
		before := lost | d.before(l)
		switch {
		case l.removed:
		case l.gone:
			lost |= d.lose(l.rule)
		case reason != "" && !l.stands:
			l.wait(name, reason)
			lost |= d.lose(l.rule)
		case l.missing():
			if s.decides(l.rule) {
				reason = behindRule(name, l.rule)
			}
			lost |= d.lose(l.rule)
		case !l.stands && s.mustWait(l, before):
			reason = s.why(&d, list, i, lost)
			l.wait(name, reason)
			lost |= d.lose(l.rule)
		default:
			if reason != "" {
				s.below(l.rule, reason)
			} else if s.of(l.rule).lets(before) && s.fills(l.rule.Target) {
				s.below(l.rule, s.why(&d, list, i, lost))
			}
			s.unfit[name] = s.unfit[name] || s.mustWait(l, before)
			lost |= inside | d.behind(l.rule)
		}
	}
	s.lost[name] = lost | d.lacks
	return s.lost[name]
}

// mustWait reports whether a rule must not be in force behind rules with these lost fates.
func (s *gapSearch) mustWait(l *line, lost fate) bool {
	return s.of(l.rule).lets(lost) || s.unfit[l.rule.Target]
}

// builtin decides which jumps of a built-in chain wait. list has its other rules, too, in their
// order after the replay. Unlike in chain, jumps behind a gap wait only if they may let packets
// in.
func (s *gapSearch) builtin(name string, list []*line) {
	lost, d := fate(0), detour{gapSearch: s, chain: name}
	for i, l := range list {
		before := lost | d.before(l)
		switch {
		case l.gone || l.missing():
			if lost |= d.lose(l.rule); s.leaves(l.rule) {
				lost = grants | keeps
			}
		case !l.stands && s.mustWait(l, before):
			l.wait(name, s.why(&d, list, i, lost))
			lost |= d.lose(l.rule)
		default:
			if s.of(l.rule).lets(before) && s.fills(l.rule.Target) {
				s.below(l.rule, s.why(&d, list, i, lost))
			}
			lost |= s.chain(l.rule.Target) | d.behind(l.rule)
		}
	}
}

// below makes the chains wait that a rule in force leads to, if a replay would fill them. The
// rule itself cannot wait: a replay leaves it in force. A new chain causes another pass.
func (s *gapSearch) below(r rules.Rule, reason string) {
	if !s.fills(r.Target) {
		return
	}
	s.waiting[r.Target], s.grown = reason, true
	for _, l := range s.lines[r.Target] {
		if l.stands {
			s.below(l.rule, reason)
		}
	}
}

// fills reports whether a replay may write rules of a chain that does not wait yet.
func (s *gapSearch) fills(chain string) bool {
	_, waits := s.waiting[chain]
	return !waits && s.lines[chain] != nil
}

// wait makes a rule wait behind a gap, for this reason. A rule that cannot be put back keeps
// its own reason.
func (l *line) wait(chain, reason string) {
	if l.held == nil {
		l.held = &QuarantinedRule{Chain: chain, Rule: l.rule, Reason: reason, Waits: true}
	}
}

func behindRule(chain string, r rules.Rule) string {
	return fmt.Sprintf("waits behind %q of %s, which cannot be put back", r.Label(), chain)
}

// why returns the reason of the i-th rule of a chain, which must wait or leads to waiting
// chains. lost are the fates that packets miss before it. The operator reads it in
// QuarantinedRule.Reason.
func (s *gapSearch) why(d *detour, list []*line, i int, lost fate) string {
	r := list[i].rule
	_, more := s.lostMarks.Misleads(r)
	switch {
	case s.of(r).lets(lost):
		return d.reasonBehind(list, i)
	case s.of(r)&grants != 0 && (len(d.meet) > 0 || more):
		return d.cause(r)
	}
	return fmt.Sprintf("waits, because chain %s lacks rules", r.Target)
}

// reasonBehind returns the reason of the i-th rule of a chain, which waits behind others. No line
// is searched twice: thousands of rules may wait behind the same one.
func (d *detour) reasonBehind(list []*line, i int) string {
	if d.reason == "" {
		d.reason = "waits behind rules that are missing"
	}
	from := d.searched
	d.searched = i
	for _, l := range slices.Backward(list[from:i]) {
		less, _ := d.lostMarks.Misleads(l.rule)
		switch {
		case l.missing():
			d.reason = behindRule(l.held.Chain, l.rule)
		case d.lost[l.rule.Target]&keeps != 0:
			d.reason = fmt.Sprintf("waits behind chain %s, which lacks rules", l.rule.Target)
		case less && d.of(l.rule)&keeps != 0:
			d.reason = fmt.Sprintf("waits behind %q, which looks for the mark of a missing rule", l.rule.Label())
		default:
			continue
		}
		break
	}
	return d.reason
}
