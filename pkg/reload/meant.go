package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// mean notes a chain that the plan does not write as the job's generation has it. Learned.Mean
// then takes it into the generation. The noted chain lacks the rules to chains that their owner
// removed. It has the other rules as written, and the quarantined rules, which still belong to
// it.
func (p *tablePlan) mean(c rules.Chain, lines []*line) {
	meant, differs := rules.Chain{Name: c.Name}, false
	for _, l := range lines {
		differs = differs || l.removed || l.held != nil || !l.stands && l.writable != l.rule
		switch {
		case l.removed:
		case l.held != nil || l.stands:
			meant.Rules = append(meant.Rules, l.rule)
		default:
			meant.Rules = append(meant.Rules, l.writable)
		}
	}
	if !differs {
		return
	}
	p.meant.Chains = append(p.meant.Chains, meant)
	p.meant.DependsOn = p.want.Section.DependsOn
	if p.want.Section.IsLedTo(c.Name) {
		p.meant.LedTo = union(p.meant.LedTo, []string{c.Name})
	}
}

// joinMeant joins the Meant of two writes of one run, for after. If both have a chain, the
// later one counts.
func joinMeant(earlier, later rules.Section) rules.Section {
	again := nameSet(rules.ChainNames(later.Chains))
	later.Chains = slices.Clip(later.Chains)
	for _, c := range earlier.Chains {
		if !again[c.Name] {
			later.Chains = append(later.Chains, c)
		}
	}
	later.Jumps = keepJumps(earlier.Jumps, later.Jumps, func(rules.Jump) bool { return true })
	later.LedTo = union(earlier.LedTo, later.LedTo)
	later.DependsOn = later.NotLedTo(union(earlier.DependsOn, later.DependsOn))
	return later
}

// Mean adds a [TableResult]'s Meant and Quarantined to the generation of a table. The replay must
// be proved, or its marks in force. The caller must call it before Supplement compares a read with
// the generation. Otherwise the replay's own changes would count as written by the chain's owner,
// and end the quarantine of that chain. The replayed generation may also differ from the learned
// one.
func (l Learned) Mean(id rules.TableID, meant rules.Section, quarantined []QuarantinedRule) Learned {
	s := l.Generation[id]
	s.Chains = slices.Clone(s.Chains)
	at := make(map[string]int, len(s.Chains))
	for i, c := range s.Chains {
		at[c.Name] = i
	}
	for _, c := range meant.Chains {
		if i, known := at[c.Name]; known {
			s.Chains[i] = c
			continue
		}
		s.Chains = append(s.Chains, c)
		if meant.IsLedTo(c.Name) {
			s.LedTo = union(s.LedTo, []string{c.Name})
		}
	}
	held := heldRules(quarantined)
	s.Jumps = keepJumps(meant.Jumps, s.Jumps, func(h rules.Jump) bool { return held.has(h.Chain, h.Rule) })
	s.DependsOn = s.NotLedTo(union(s.DependsOn, meant.DependsOn))
	l.Generation = l.Generation.With(id, s)
	return l
}
