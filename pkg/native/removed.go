package native

import (
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// MuchOfPart and MuchOfTable are the smallest losses that are reported, in rules or elements.
// MuchOfPart is for a chain or set that keeps a part. A single removed endpoint is no news.
const (
	MuchOfPart  = 10
	MuchOfTable = 20
)

// A Removed is a part of a table that has lost much, or a chain to which nothing leads any more.
type Removed struct {
	Kind nft.ObjectKind // Tables, Chains or Sets; Rules: the last jump to a chain that has rules
	Name string         // of the chain or set
	Gone int            // rules, or elements of a set
	Left int
	By   *Deed // the last deed that took from it; nil: not known
	// Chains and Elements count the chains and elements that a table lost together with its rules.
	Chains, Elements int
}

// LargeRemovals returns the removals that are reported when they are learned as the owner's doing.
// These are more than half of a table, or else of a chain or set. They are also all rules of a
// chain that packets still reach, and all elements of a set, by a commit that did nothing else. The
// last jump to a chain that keeps its rules is reported if a commit only took. deeds are the deeds
// since was, the oldest first.
//
// It is everyday work if a chain is deleted with all jumps to it, or a set with all rules that name
// it. So is each deed that is known to be the owner's. Elements that packets add or time removes
// count only if one commit took several and no other is left.
func LargeRemovals(was, now *Table, deeds []*Deed) []Removed {
	return slices.DeleteFunc(largeRemovals(Evidence{Was: was, Now: now, Deeds: deeds}), func(r Removed) bool {
		return r.By != nil && r.By.By == Owner
	})
}

// largeRemovals is LargeRemovals with the removals by known owners. If the table lost more than
// half of its rules, that is the only result. It looks for unreached chains only if it finds
// nothing else and a commit only took.
func largeRemovals(e Evidence) []Removed {
	was, now := e.Was, e.Now
	hadChains, had, _ := was.Counts()
	hasChains, has, _ := now.Counts()
	chains, sets := now.chainsByName(), now.setsByName()
	if had-has >= MuchOfTable && 2*has < had {
		r := Removed{Kind: nft.Tables, Gone: had - has, Left: has, Chains: max(hadChains-hasChains, 0),
			By: e.last(func(d *Deed) int { return len(d.Rules) + d.Lost })}
		for i := range was.Sets {
			if s := &was.Sets[i]; !s.Anonymous() && !s.fleeting() {
				r.Elements += max(s.count()-sets[s.Name].count(), 0)
			}
		}
		return []Removed{r}
	}
	var list []Removed
	led := sync.OnceValue(func() map[string]bool { // it decodes each rule
		all := map[string]bool{}
		for name := range now.jumps() {
			all[name] = true
		}
		return all
	})
	for i := range was.Chains {
		c := &was.Chains[i]
		r := Removed{Kind: nft.Chains, Name: c.Name, Gone: len(c.Rules)}
		if stands := chains[c.Name]; stands != nil {
			r.Left = len(stands.Rules)
			r.Gone -= r.Left
		}
		emptied := r.Gone > 0 && r.Left == 0 && !c.Bound && (c.Base || led()[c.Name])
		if emptied || r.much() {
			r.By = e.last(func(d *Deed) int { return d.Rules[c.Name] })
			list = append(list, r)
		}
	}
	for i := range was.Sets {
		s := &was.Sets[i]
		stands := sets[s.Name]
		if stands == nil || s.Anonymous() {
			continue
		}
		r := Removed{Kind: nft.Sets, Name: s.Name, Gone: s.count() - stands.count(), Left: stands.count()}
		by := e.last(func(d *Deed) int { return d.Elements[s.Name] })
		if s.fleeting() && (r.Left > 0 || by == nil || !by.pure() || !e.onlyEmptied(by, 2)) {
			continue
		}
		if r.much() || r.Gone > 0 && (by == nil && r.Left == 0 || by != nil && by.pure() && e.onlyEmptied(by, 1)) {
			r.By = by
			list = append(list, r)
		}
	}
	if len(list) == 0 && slices.ContainsFunc(e.Deeds, (*Deed).pure) {
		return e.unreached(led())
	}
	return list
}

// unreached returns the chains that keep all their rules, but to which nothing leads any more:
// their last jump was removed. led has the chains to which something still leads.
func (e *Evidence) unreached(led map[string]bool) (list []Removed) {
	now, before := e.Now.chainsByName(), map[string]bool{}
	for name := range e.Was.jumps() {
		before[name] = true
	}
	for i := range e.Was.Chains {
		c := &e.Was.Chains[i]
		stands := now[c.Name]
		if c.Base || c.Bound || !before[c.Name] || led[c.Name] || len(c.Rules) == 0 || stands == nil || len(stands.Rules) < len(c.Rules) {
			continue
		}
		list = append(list, Removed{Kind: nft.Rules, Name: c.Name, Gone: 1, By: e.last(func(d *Deed) int { return len(d.Rules) + len(d.Elements) })})
	}
	return list
}

// much reports whether more than half is gone, and at least MuchOfPart.
func (r Removed) much() bool { return r.Gone >= MuchOfPart && r.Gone > r.Left }

// count returns the number of elements as people count them, for LargeRemovals. An interval is
// one, although the kernel has two elements for it. A nil set has none.
func (s *Set) count() int {
	if s == nil {
		return 0
	}
	n := len(s.Elements)
	if s.Flags&unix.NFT_SET_INTERVAL != 0 {
		for _, e := range s.Elements {
			if isEnd(e) {
				n--
			}
		}
	}
	return n
}
