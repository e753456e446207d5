package accepted

import (
	"cmp"
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
	count := before.RuleCount()
	if count != s.left {
		*s = shrinking{began: now} // rules are back, but not by their owner
	}
	s.left = after.RuleCount()
	changed := rules.ChangedChains(before.Chains, after.Chains)
	gone := map[string]bool{}
	changed = slices.DeleteFunc(changed, func(x rules.ChangedChain) bool {
		if x.Is >= 0 {
			return false
		}
		c := &before.Chains[x.Was]
		led := before.IsLedTo(c.Name)
		if gone[c.Name] = !led; led && !c.LeftOut() {
			count -= len(c.Rules)
		}
		return led
	})
	s.add(before, after, changed, now)
	step := count - s.left
	if s.rules = max(0, s.rules+step); s.rules >= muchOfTable && s.rules > s.left {
		a := Removal{Accepted: api.Accepted{Rules: s.rules, Left: s.left}, Steps: s.rules > step,
			Finding: canary.Finding{Emptied: slices.Sorted(maps.Keys(s.chains))}}
		s.rules, s.chains = 0, nil
		return []Removal{a}
	}
	var list []Removal
	for _, x := range changed {
		if x.Was < 0 || x.Is < 0 {
			continue
		}
		c, now := before.Chains[x.Was], after.Chains[x.Is]
		step := len(c.Rules) - len(now.Rules)
		less := max(s.chains[c.Name], step)
		switch {
		case step <= 0 || c.LeftOut() || now.LeftOut():
			continue
		case len(now.Rules) == 0 && (!leadsTo(after, c.Name) || allGone(c, gone)):
			continue // deleted with the chains around it, like a pod's or a service's
		case len(now.Rules) > 0 && (less < muchOfChain || less <= len(now.Rules)):
			continue
		}
		delete(s.chains, c.Name)
		list = append(list, Removal{Accepted: api.Accepted{Chain: c.Name, Rules: less, Left: len(now.Rules)}, Steps: less > step,
			Finding: canary.Finding{Emptied: []string{c.Name}}})
	}
	for i, h := range before.Jumps {
		if rules.Copies(after.Jumps, h) > rules.Copies(before.Jumps[:i], h) {
			continue // it exists
		}
		if into, _ := after.Chain(h.Into()); !h.Named && (len(into.Rules) == 0 || jumpsTo(after, h.Into())) {
			continue // its chain is gone too, or its owner rewrote it
		}
		list = append(list, Removal{Accepted: api.Accepted{Chain: h.Chain, Rule: h.Rule.Label(), Rules: 1},
			Finding: canary.Finding{Jumps: []rules.Jump{h}}})
	}
	return list
}

// add counts the rules that each changed chain has lost or gained between before and after. A
// chain whose gains make up for its losses is forgotten.
func (s *shrinking) add(before, after rules.Section, changed []rules.ChangedChain, now time.Time) {
	for _, x := range changed {
		var was, is rules.Chain
		if x.Was >= 0 {
			was = before.Chains[x.Was]
		}
		if x.Is >= 0 {
			is = after.Chains[x.Is]
		}
		name, gone := cmp.Or(was.Name, is.Name), len(was.Rules)-len(is.Rules)
		known := s.chains[name]
		switch {
		case was.LeftOut() || is.LeftOut() || gone == 0 || known == 0 && len(s.chains) >= shrinkingChains:
			continue
		case known+gone <= 0:
			delete(s.chains, name)
			continue
		case s.chains == nil:
			s.chains = map[string]int{}
		}
		s.chains[name] = known + gone
		if gone > 0 {
			s.last = now
		}
	}
}
