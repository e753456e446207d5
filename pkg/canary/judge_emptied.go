package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// judgeEmptied sorts the emptied chains of a table whose canary is present: they are lost, they
// wait, or their owner emptied them. The rules of lost chains still count as references to
// other chains.
func (f *Finding) judgeEmptied(want Wanted, seen Seen, emptied []rules.Chain) {
	led := targets(seen.Table, len(emptied) > 0)
	for n := -1; n != len(f.Emptied); {
		n = len(f.Emptied)
		emptied = slices.DeleteFunc(emptied, func(c rules.Chain) bool {
			if !f.emptiedWhole(seen, c, led[c.Name]) {
				return false
			}
			for _, r := range c.Rules {
				led[r.Target] = true
			}
			return true
		})
	}
	for _, c := range emptied {
		if habit := owners.EmptyingOf(seen.Table.Name, c.Name); habit != owners.EmptyOften {
			if led[c.Name] && habit == owners.EmptyBriefly {
				f.Waiting = append(f.Waiting, rules.Jump{Chain: c.Name, Rule: c.Rules[0]})
			}
			continue
		}
		i := orphaned(want, seen.Table, c)
		if i < 0 {
			continue
		}
		if h := (rules.Jump{Chain: c.Name, Rule: c.Rules[i]}); !seen.over(h) && (want.shared(c.Name) || want.shared(h.Rule.Target)) {
			f.Waiting = append(f.Waiting, h)
		} else {
			f.Emptied = append(f.Emptied, c.Name)
		}
	}
}

// emptiedWhole records a chain that is lost by its owner's habit, and reports whether it is
// lost. led: rules lead to it. judgeEmptied then takes its rules for references.
func (f *Finding) emptiedWhole(seen Seen, c rules.Chain, led bool) bool {
	lost := false
	switch owners.EmptyingOf(seen.Table.Name, c.Name) {
	case owners.EmptyNever:
		lost = true
	case owners.EmptyUnreferenced:
		lost = led
	case owners.EmptyBriefly:
		lost = led && seen.over(rules.Jump{Chain: c.Name, Rule: c.Rules[0]})
	}
	if lost {
		f.Emptied = append(f.Emptied, c.Name)
	}
	return lost
}

// over reports whether the grace of a missing jump, or of an emptied chain, is over.
func (s Seen) over(h rules.Jump) bool { return s.Quiet || s.Over != nil && s.Over(h) }

// targets returns the chains that rules of the table lead to. judgeEmptied takes some emptied
// chains for lost only if they are among these. It returns nil unless needed.
func targets(t *rules.Table, needed bool) map[string]bool {
	if !needed {
		return nil
	}
	led := map[string]bool{}
	for i := range t.Chains {
		for _, r := range t.Chains[i].Rules {
			led[r.Target] = true
		}
	}
	return led
}

// below returns the missing chains that rules of the emptied chains led to, directly or through
// other missing chains. These are lost, too. The other missing chains were removed by their
// owner.
func below(s rules.Section, emptied, missing []string) []string {
	if len(missing) == 0 {
		return nil
	}
	gone, led, held := map[string]bool{}, map[string]bool{}, map[string][]rules.Rule{}
	for _, name := range missing {
		gone[name] = true
	}
	for _, c := range s.Chains {
		held[c.Name] = c.Rules
	}
	for next := emptied; len(next) > 0; {
		name := next[0]
		next = next[1:]
		for _, r := range held[name] {
			if gone[r.Target] && !led[r.Target] {
				led[r.Target] = true
				next = append(next, r.Target)
			}
		}
	}
	return slices.DeleteFunc(slices.Clone(missing), func(name string) bool { return !led[name] })
}
