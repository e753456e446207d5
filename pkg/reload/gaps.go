package reload

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A gap is a rule that decides and cannot be put back. A packet that comes to it would go on to
// rules that the whole kept it from: a missing RETURN leads to the MASQUERADE behind it, a missing
// DROP to an ACCEPT. A replay never lets in what both the complete rules and the flush kept out:
//
//   - In a protected chain all rules behind a gap wait.
//   - A chain with a gap returns packets that it decided about before. If it may have kept one out,
//     the rules wait that may let it in, in each chain that leads there; the first of them is a gap
//     too. So this goes on up to the built-in chain. After a lost ACCEPT no rule of another chain
//     waits, and in nat none after a lost translation: of those an ACCEPT keeps a packet out.
//   - In a built-in chain jumps belong to many owners, and only those wait that may let a packet
//     in. One that stands cannot wait, so the chains that it leads to wait instead, if they are
//     empty.
//
// What waits is quarantined, and comes back in its order with the rule that it waits for.

// A line is one rule of a chain, with what a replay makes of it.
type line struct {
	rule     rules.Rule // as the generation has it, or as it stands
	writable rules.Rule // as it is written
	weakened []QuarantinedRule
	stands   bool // it is in the kernel, and stays there
	removed  bool // it leads to a chain that its owner has removed
	gone     bool // it may be what its owner removed, which is not learned yet, or a flush took it
	// held says why the rule is quarantined; nil if it is written, or stands.
	held *QuarantinedRule
}

// missing reports whether the rule cannot be had.
func (l *line) missing() bool { return l.held != nil && !l.held.Waits }

// A gapSearch finds the rules of one table that wait.
type gapSearch struct {
	*fates
	lines map[string][]*line // of every chain
	// Each pass makes these again. lost are the fates that packets miss in a chain. unfit are
	// chains that stand and of which a rule ought to wait: no further rule may lead there.
	lost  map[string]fate
	unfit map[string]bool
	// waiting are chains of which no rule is written, with the reason. grown says that this pass
	// found one more.
	waiting map[string]string
	grown   bool
}

// findGaps holds back the rules of a plan that wait.
func (t *tableTask) findGaps(chains *chosenChains, jumps map[string]*chosenJumps) {
	chains.readLines(t)
	for chain, list := range jumps {
		list.order(standingRules(*t, chain), chain)
	}
	s := &gapSearch{fates: t.fates(), lines: chains.lines, waiting: map[string]string{}}
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
}

// release lets the rules go that wait.
func release(list []*line) {
	for _, l := range list {
		if l.held != nil && l.held.Waits {
			l.held = nil
		}
	}
}

// chain decides about the rules of one chain, and returns the fates that packets miss there.
func (s *gapSearch) chain(name string) fate {
	if lost, known := s.lost[name]; known {
		return lost
	}
	s.lost[name] = 0 // the kernel takes no loop
	reason, lost := s.waiting[name], fate(0)
	list := s.lines[name]
	for i, l := range list {
		f := s.of(l.rule)
		inside := s.chain(l.rule.Target)
		switch {
		case l.removed:
		case l.gone:
			lost |= f
		case reason != "" && !l.stands:
			l.wait(name, reason)
			lost |= f
		case l.missing() && s.decides(l.rule):
			reason = behindRule(name, l.rule)
			lost |= f
		case l.missing():
		case !l.stands && s.mustWait(l, lost):
			reason = s.why(list, i, lost)
			l.wait(name, reason)
			lost |= f
		default:
			if reason != "" {
				s.below(l.rule, reason)
			} else if f.lets(lost) {
				s.below(l.rule, s.behind(list[:i]))
			}
			s.unfit[name] = s.unfit[name] || s.mustWait(l, lost)
			lost |= inside
		}
	}
	s.lost[name] = lost
	return lost
}

// mustWait reports whether a rule must not stand behind rules of which these fates are lost.
func (s *gapSearch) mustWait(l *line, lost fate) bool {
	return s.of(l.rule).lets(lost) || s.unfit[l.rule.Target]
}

// builtin decides about the jumps of a built-in chain.
func (s *gapSearch) builtin(name string, list []*line) {
	lost := fate(0)
	for i, l := range list {
		f := s.of(l.rule)
		switch {
		case (l.gone || l.missing()) && s.leaves(l.rule):
			lost = grants | keeps
		case l.gone || l.missing():
			lost |= f
		case !l.stands && s.mustWait(l, lost):
			l.wait(name, s.why(list, i, lost))
			lost |= f
		default:
			if f.lets(lost) {
				s.below(l.rule, s.behind(list[:i]))
			}
			lost |= s.chain(l.rule.Target)
		}
	}
}

// below makes the chains wait that a standing rule leads to, as far as a replay would fill them.
func (s *gapSearch) below(r rules.Rule, reason string) {
	list, ok := s.lines[r.Target]
	if _, already := s.waiting[r.Target]; !ok || already {
		return
	}
	s.waiting[r.Target], s.grown = reason, true
	for _, l := range list {
		if l.stands {
			s.below(l.rule, reason)
		}
	}
}

// wait holds a rule back. A rule that cannot be had keeps its own reason.
func (l *line) wait(chain, reason string) {
	if l.held == nil {
		l.held = &QuarantinedRule{Chain: chain, Rule: l.rule, Reason: reason, Waits: true}
	}
}

func behindRule(chain string, r rules.Rule) string {
	return fmt.Sprintf("waits behind %q of %s, which cannot be put back", r.Label(), chain)
}

// why returns the reason of the i-th rule of a chain, which must wait.
func (s *gapSearch) why(list []*line, i int, lost fate) string {
	if !s.of(list[i].rule).lets(lost) {
		return fmt.Sprintf("waits, because chain %s lacks rules", list[i].rule.Target)
	}
	return s.behind(list[:i])
}

// behind returns the reason of a rule that waits behind these rules of its chain.
func (s *gapSearch) behind(before []*line) string {
	for _, l := range slices.Backward(before) {
		if l.missing() {
			return behindRule(l.held.Chain, l.rule)
		}
		if s.lost[l.rule.Target]&keeps != 0 {
			return fmt.Sprintf("waits behind chain %s, which lacks rules", l.rule.Target)
		}
	}
	return "waits behind rules that are missing"
}
