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
	// shrinksOn is how long after a loss the next one of the table counts with it: a script that
	// deletes rule by rule takes most of a table in steps, each learned by itself.
	shrinksOn = time.Minute
	// shrinksFor bounds the losses that count together: endpoints come and go for ever.
	shrinksFor = 10 * time.Minute
	// shrinkingChains bounds the chains whose losses are counted.
	shrinkingChains = 4096
)

// A shrinking is the sum of a table's losses that follow each other. Rules that come meanwhile
// count against it. The zero value has none.
type shrinking struct {
	began, last time.Time
	rules, left int
	chains      map[string]int // rules, of the chains that have fewer now
}

// shrink returns the losses of a table that a loss of now would follow.
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

// take adds the losses of a section, and returns those that are much of it by now. A chain that no
// protected rule leads to any more is not lost for that.
func (s *shrinking) take(before, after rules.Section, now time.Time) []Removal {
	if before.RuleCount() != s.left {
		*s = shrinking{began: now} // rules came back otherwise than by their owner
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
		now, stands := left[c.Name]
		step := len(c.Rules) - len(now.Rules)
		gone := max(s.chains[c.Name], step)
		switch {
		case !stands || step <= 0 || c.LeftOut() || now.LeftOut():
			continue
		case len(now.Rules) == 0 && (!leadsTo(after, c.Name) || allGone(c, stood, left)):
			continue // it goes with all that led to it, or that it led to: a pod, a service
		case len(now.Rules) > 0 && (gone < muchOfChain || gone <= len(now.Rules)):
			continue
		}
		delete(s.chains, c.Name)
		list = append(list, Removal{Accepted: api.Accepted{Chain: c.Name, Rules: gone, Left: len(now.Rules)}, Steps: gone > step,
			Finding: canary.Finding{Emptied: []string{c.Name}}})
	}
	for i, h := range before.Jumps {
		if !h.Named && (len(left[h.Into()].Rules) == 0 || jumpsTo(after, h.Into())) || rules.Copies(after.Jumps, h) > rules.Copies(before.Jumps[:i], h) {
			continue // its chain went too, or its owner wrote it in other words, or it stands
		}
		list = append(list, Removal{Accepted: api.Accepted{Chain: h.Chain, Rule: h.Rule.Label(), Rules: 1},
			Finding: canary.Finding{Jumps: []rules.Jump{h}}})
	}
	return list
}

// add counts the rules that each chain has lost or gained.
func (s *shrinking) add(before, after map[string]rules.Chain, now time.Time) {
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
	for name, c := range before {
		if now := after[name]; !c.LeftOut() && !now.LeftOut() {
			count(name, len(c.Rules)-len(now.Rules))
		}
	}
	for name, c := range after {
		if _, stood := before[name]; !stood && !c.LeftOut() {
			count(name, -len(c.Rules))
		}
	}
}
