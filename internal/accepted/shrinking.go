package accepted

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// shrinksOn is how long after a loss the table's next loss counts with it. A script that
	// deletes rule by rule removes most of a table in steps, each learned by itself.
	shrinksOn = time.Minute
	// shrinksFor bounds the time of losses that count together, because endpoints change
	// forever.
	shrinksFor = 10 * time.Minute
	// shrinkingChains bounds the chains whose losses are counted.
	shrinkingChains = 4096
)

// A shrinking is the sum of a table's successive losses. Rules that are added meanwhile count
// against it. The zero value has none.
type shrinking struct {
	began, last time.Time
	rules, left int
	chains      map[string]int // rules, of the chains that have fewer now
}

// shrink returns the series of losses to which a loss of a table now belongs. A new one begins
// if the last loss is shrinksOn ago, or the series has lasted for shrinksFor.
func (a *List) shrink(id rules.TableID, now time.Time) *shrinking {
	s := a.shrinking[id]
	if s == nil || now.Sub(s.last) >= shrinksOn || now.Sub(s.began) >= shrinksFor {
		if s = (&shrinking{began: now}); a.shrinking == nil {
			a.shrinking = map[rules.TableID]*shrinking{}
		}
		a.shrinking[id] = s
	}
	return s
}

// take adds the losses between two learned sections to the series, and returns the losses that
// have become large, for the report. A chain is not lost because no protected rule leads to it
// any more.
func (s *shrinking) take(before, after rules.Section, now time.Time) []Removal {
	if before.RuleCount() != s.left {
		*s = shrinking{began: now} // rules are back, but not by their owner
	}
	s.left = after.RuleCount()
	if len(before.LedTo) > 0 {
		held := chainsByName(after)
		before.Chains = slices.DeleteFunc(slices.Clone(before.Chains), func(c rules.Chain) bool {
			_, stands := held[c.Name]
			return !stands && before.IsLedTo(c.Name)
		})
	}
	stood, left := chainsByName(before), chainsByName(after)
	s.add(stood, left, now)
	step := before.RuleCount() - s.left
	if s.rules = max(0, s.rules+step); s.rules >= muchOfTable && s.rules > s.left {
		a := Removal{Accepted: api.Accepted{Rules: s.rules, Left: s.left}, Steps: s.rules > step,
			Finding: canary.Finding{Emptied: slices.Sorted(maps.Keys(s.chains))}}
		s.rules, s.chains = 0, nil
		return []Removal{a}
	}
	var list []Removal
	for _, c := range before.Chains {
		standing, stands := left[c.Name]
		now := rules.Chain{Rules: standing}
		step := len(c.Rules) - len(now.Rules)
		gone := max(s.chains[c.Name], step)
		switch {
		case !stands || step <= 0 || c.LeftOut() || now.LeftOut():
			continue
		case len(now.Rules) == 0 && (!leadsTo(after, c.Name) || allGone(c, stood, left)):
			continue // deleted with the chains around it, like a pod's or a service's
		case len(now.Rules) > 0 && (gone < muchOfChain || gone <= len(now.Rules)):
			continue
		}
		delete(s.chains, c.Name)
		list = append(list, Removal{Accepted: api.Accepted{Chain: c.Name, Rules: gone, Left: len(now.Rules)}, Steps: gone > step,
			Finding: canary.Finding{Emptied: []string{c.Name}}})
	}
	for i, h := range before.Jumps {
		if !h.Named && (len(left[h.Into()]) == 0 || jumpsTo(after, h.Into())) || rules.Copies(after.Jumps, h) > rules.Copies(before.Jumps[:i], h) {
			continue // its chain is gone too, or its owner rewrote it, or it exists
		}
		list = append(list, Removal{Accepted: api.Accepted{Chain: h.Chain, Rule: h.Rule.Label(), Rules: 1},
			Finding: canary.Finding{Jumps: []rules.Jump{h}}})
	}
	return list
}

// add counts the rules that each chain has lost or gained between before and after. A chain
// whose gains make up for its losses is forgotten.
func (s *shrinking) add(before, after map[string][]rules.Rule, now time.Time) {
	count := func(name string, gone int) {
		known := s.chains[name]
		switch {
		case gone == 0 || known == 0 && len(s.chains) >= shrinkingChains:
			return
		case known+gone <= 0:
			delete(s.chains, name)
			return
		case s.chains == nil:
			s.chains = map[string]int{}
		}
		s.chains[name] = known + gone
		if gone > 0 {
			s.last = now
		}
	}
	leftOut := func(list []rules.Rule) bool { return len(list) == 1 && list[0].LeftOut() }
	for name, was := range before {
		if now := after[name]; !leftOut(was) && !leftOut(now) {
			count(name, len(was)-len(now))
		}
	}
	for name, now := range after {
		if _, stood := before[name]; !stood && !leftOut(now) {
			count(name, -len(now))
		}
	}
}
