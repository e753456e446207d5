package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file judges the chains of other owners that are guarded because protected rules lead to
// them. Their owners, such as ufw, empty, delete and rewrite them freely while the marks are
// present. If a replay writes a rule that leads to such a chain, it also writes the chain. The
// rule alone would let in packets that the chain kept out.

// withoutLedTo is lostChains without the chains of s.LedTo, which are no loss by themselves. It
// returns these in led: true if the chain is missing, false if it is empty. led is nil if s has
// no such chain.
func withoutLedTo(s rules.Section, seen Seen) (emptied []rules.Chain, missing []string, led map[string]bool) {
	emptied, missing = lostChains(s, seen)
	if len(s.LedTo) == 0 {
		return emptied, missing, nil
	}
	led = map[string]bool{}
	emptied = slices.DeleteFunc(emptied, func(c rules.Chain) bool {
		is := s.IsLedTo(c.Name)
		if is {
			led[c.Name] = false
		}
		return is
	})
	missing = slices.DeleteFunc(missing, func(name string) bool {
		is := s.IsLedTo(name)
		if is {
			led[name] = true
		}
		return is
	})
	return emptied, missing, led
}

// losesWith adds to a loss in a table with its canary the led chains to which a lost rule
// leads, directly or through other chains. s is the wanted section, and led is from
// withoutLedTo. A replay does not change a chain that is not lost.
func (f *Finding) losesWith(s rules.Section, t *rules.Table, led map[string]bool) {
	next := slices.Concat(f.Emptied, f.Missing)
	for _, name := range next {
		delete(led, name)
	}
	if len(led) == 0 {
		return
	}
	lost := map[string]bool{} // chains that the replay writes
	for _, v := range f.Drift {
		next = append(next, v.Chain)
		for _, r := range v.Rules {
			next = append(next, r.Target)
		}
	}
	for _, name := range next {
		lost[name] = true
	}
	for _, h := range slices.Concat(f.Jumps, f.Taken) {
		next = append(next, h.Rule.Target)
	}
	wanted := make(map[string][]rules.Rule, len(s.Chains))
	for _, c := range s.Chains {
		wanted[c.Name] = c.Rules
	}
	reached := map[string]bool{}
	for ; len(next) > 0; next = next[1:] {
		name := next[0]
		if reached[name] {
			continue
		}
		reached[name] = true
		missing, isLed := led[name]
		switch {
		case isLed && missing:
			f.Missing = append(f.Missing, name)
		case isLed:
			f.Emptied = append(f.Emptied, name)
		}
		list := t.Rules(name)
		if isLed || lost[name] {
			list = wanted[name]
		}
		for _, r := range list {
			next = append(next, r.Target)
		}
	}
}
