package canary

import (
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file judges rules and chains that a purge deleted by name. A purge is a process that
// also deletes canaryd's marks, and owns none of the rules.

func (w Wanted) purged(chain, target string) bool {
	return w.Purged != nil && w.Purged(chain, target)
}

// jumpPurged is purged for a jump. For a Named jump only its chain is known.
func (w Wanted) jumpPurged(h rules.Jump) bool { return w.purged(h.Chain, h.Into()) }

// chainPurged is purged for a protected chain.
func (w Wanted) chainPurged(chain string) bool { return w.purged(chain, "") }

// judgePurged records the chains that a purge emptied in a table whose canary is present, and
// removes them from emptied and led. judgeContent judges the rest. It returns the missing
// chains that a purge deleted.
func (f *Finding) judgePurged(want Wanted, emptied *[]rules.Chain, missing []string, led map[string]bool) (gone []string) {
	if want.Purged == nil {
		return nil
	}
	*emptied = slices.DeleteFunc(*emptied, func(c rules.Chain) bool {
		purged := want.chainPurged(c.Name)
		if purged {
			f.Emptied = append(f.Emptied, c.Name)
		}
		return purged
	})
	gone = slices.DeleteFunc(slices.Clone(missing), func(chain string) bool { return !want.chainPurged(chain) })
	for _, name := range slices.Sorted(maps.Keys(led)) {
		switch {
		case !want.chainPurged(name):
			continue
		case led[name]:
			gone = append(gone, name)
		default:
			f.Emptied = append(f.Emptied, name)
		}
		delete(led, name)
	}
	return gone
}

// rememberPurged records the rules and chains that a purge took from a table that lost its
// mark. A chain that the purge deleted was not removed by its owner.
func (f *Finding) rememberPurged(want Wanted, seen Seen) {
	if want.Purged == nil {
		return
	}
	if f.Verdict != Replaced {
		f.takePurged(want, seen.Table)
	}
	var released, gone []string
	for _, chain := range f.Released {
		if want.chainPurged(chain) {
			gone = append(gone, chain)
		} else {
			released = append(released, chain)
		}
	}
	f.Missing, f.Released = merge(f.Missing, gone), released
}

// takePurged records the rules that a purge took from protected chains that still hold others,
// and reports whether there are any. Then judgeContent finds a loss.
func (f *Finding) takePurged(want Wanted, t *rules.Table) (found bool) {
	if want.Purged == nil {
		return false
	}
	robbed := f.Taken
	for _, wanted := range want.Section.Chains {
		c := t.Chain(wanted.Name)
		if c == nil || len(c.Rules) == 0 || c.LeftOut() || wanted.LeftOut() || rules.EqualRules(c.Rules, wanted.Rules) {
			continue
		}
		if want.Claimed != nil && want.Claimed(wanted.Name) || !want.chainPurged(wanted.Name) {
			continue
		}
		for _, r := range rules.OnlyIn(wanted.Rules, c.Rules) {
			if h := (rules.Jump{Chain: wanted.Name, Rule: r}); !slices.ContainsFunc(robbed, h.Same) {
				f.Taken, found = append(f.Taken, h), true
			}
		}
	}
	return found
}

// merge returns the names of both lists, each once.
func merge(a, b []string) []string {
	switch {
	case len(a)+len(b) == 0:
		return nil
	case len(b) == 0:
		return a
	}
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}
