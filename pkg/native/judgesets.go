package native

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/owners"
)

// This file judges sets that lost elements, for judgeParts.

// tookSet judges a set that lost its last element, by the last deed that took from it. named
// reports whether a rule names the set: without a rule, its elements carry no traffic.
func (e *Evidence) tookSet(name string, named func() bool) loss {
	d, habit := e.last(func(d *Deed) int { return d.Elements[name] }), e.Habits.Set(name)
	if d == nil {
		if !e.Missed || habit == owners.OneAlone || !named() {
			return noLoss
		}
		return e.missed(habit, e.left(e.Was.setsByName()[name]))
	}
	if is, certain := e.foreign(d); certain {
		return lossIf(is)
	}
	switch habit {
	case owners.Keeps:
		return lossIf(d.pure() && e.onlyEmptied(d, 1))
	case owners.OneAlone:
		return lossIf(d.pure() && e.onlyEmptied(d, 2))
	}
	return noLoss
}

// left judges a set whose elements a missed commit took, for tookSet. An owner takes them
// together with the rules of the chains to which they lead. If these have rules still, the
// elements are lost. If only some have, or if they lead to no chain with rules, the owner may have
// taken elements.
func (e *Evidence) left(s *Set) loss {
	was, now := e.Was.chainsByName(), e.Now.chainsByName()
	kept, emptied := false, false
	for _, el := range s.Elements {
		if c := was[jumpOf(attrOf(el, unix.NFTA_SET_ELEM_DATA))]; c != nil && len(c.Rules) > 0 {
			has := now[c.Name] != nil && len(now[c.Name].Rules) > 0
			kept, emptied = kept || has, emptied || !has
		}
	}
	switch {
	case kept == emptied:
		return openLoss
	case kept:
		return lossOf
	}
	return noLoss
}

// replacedSet reports whether a commit of another process than the owner took all elements of a
// set, and wrote at most half as many. Then judgeParts has a merge add the lost elements.
func (e *Evidence) replacedSet(name string) bool {
	d := e.last(func(d *Deed) int { return d.Elements[name] })
	was, now := e.Was.setsByName()[name], e.Now.setsByName()[name]
	if d == nil || !was.merges(now) || d.Elements[name] < len(was.Elements) || e.rewritten(d) {
		return false
	}
	if is, certain := e.foreign(d); certain {
		return is
	}
	// An owner also takes the rules of the elements' chains, or it changes the elements' values.
	return e.Habits.Set(name) == owners.Keeps && len(d.Elements) == 1 && len(d.Rules) == 0 && d.Lost == 0
}

// rewritten reports whether the owner has rewritten a base chain in a commit after d. Then it has
// written its whole table, as in a full sync of kube-proxy, and nothing of a set is missing.
func (e *Evidence) rewritten(d *Deed) bool {
	later := e.Deeds[slices.Index(e.Deeds, d)+1:]
	return slices.ContainsFunc(later, func(d *Deed) bool {
		return d.By == Owner && d.New > 0 && slices.ContainsFunc(e.Was.Chains, func(c Chain) bool { return c.Base && d.Rules[c.Name] > 0 })
	})
}

// onlyEmptied reports whether a commit took elements and nothing else, and emptied each set
// that it touched, as a flush of sets does. One set must have lost least elements or more, and
// at least two if there are several sets. An owner that removes a service takes one element
// from each of several sets.
func (e *Evidence) onlyEmptied(d *Deed, least int) bool {
	if d == nil || len(d.Rules) > 0 || d.Lost > 0 {
		return false
	}
	most, before, after := 0, e.Was.setsByName(), e.Now.setsByName()
	for name, n := range d.Elements {
		if now := after[name]; now == nil || len(now.Elements) > 0 {
			return false
		}
		was := before[name]
		if was != nil && was.Flags&unix.NFT_SET_INTERVAL != 0 {
			n /= 2 // the beginning and the end of each
		}
		most = max(most, n)
	}
	if len(d.Elements) > 1 {
		least = max(least, 2)
	}
	return most >= least
}
