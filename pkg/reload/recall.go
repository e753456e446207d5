package reload

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Removal has the rules that a table's generation lost when a change of it was learned. It is a
// value, and shares memory with the generations before and after.
type Removal struct {
	Table  rules.TableID
	Time   time.Time
	Chains []RemovedRules
	Jumps  []rules.Jump // the removed jumps

	jumps     []rules.Jump // all jumps before, for their order
	dependsOn []string
}

// RemovedRules are the rules that one chain lost.
type RemovedRules struct {
	Chain   string
	was, is []rules.Rule
	gone    bool // the chain itself was removed
}

// RemovalOf returns the rules of was that is lacks, two sections of table id. It is empty if
// there are none. The daemon remembers removals that it learned: if the same process then
// deletes marks, it was a purge, and Recall puts them back.
func RemovalOf(id rules.TableID, was, is rules.Section, now time.Time) Removal {
	r := Removal{Table: id, Time: now, jumps: was.Jumps, dependsOn: was.DependsOn}
	for _, changed := range rules.ChangedChains(was.Chains, is.Chains) {
		if changed.Was < 0 {
			break // was has no more chains
		}
		c, i := was.Chains[changed.Was], changed.Is
		switch {
		case i < 0:
			r.Chains = append(r.Chains, RemovedRules{Chain: c.Name, was: c.Rules, gone: true})
		case is.Chains[i].LeftOut(), c.LeftOut():
		case len(rules.OnlyIn(c.Rules, is.Chains[i].Rules)) > 0:
			r.Chains = append(r.Chains, RemovedRules{Chain: c.Name, was: c.Rules, is: is.Chains[i].Rules})
		}
	}
	for _, h := range was.Jumps {
		if !slices.ContainsFunc(is.Jumps, h.Same) {
			r.Jumps = append(r.Jumps, h)
		}
	}
	return r
}

// Empty reports whether nothing was removed.
func (r Removal) Empty() bool { return len(r.Chains)+len(r.Jumps) == 0 }

// Rules returns how many rules the removal keeps in memory. The daemon forgets the oldest
// removals if there are too many.
func (r Removal) Rules() int {
	n := len(r.jumps)
	for _, c := range r.Chains {
		n += len(c.was)
	}
	return n
}

// Without returns the removal without the rules and jumps of these chains: a recall has decided
// about them.
func (r Removal) Without(chain func(string) bool) Removal {
	r.Chains = slices.DeleteFunc(slices.Clone(r.Chains), func(c RemovedRules) bool { return chain(c.Chain) })
	r.Jumps = slices.DeleteFunc(slices.Clone(r.Jumps), func(h rules.Jump) bool { return chain(h.Chain) })
	return r
}

// In returns the chains that lost rules, and the built-in chains that lost jumps. The daemon
// searches for the processes that wrote to them.
func (r Removal) In() []string {
	var list []string
	for _, c := range r.Chains {
		list = append(list, c.Chain)
	}
	for _, h := range r.Jumps {
		list = append(list, h.Chain)
	}
	return list
}

// Recalled are the chains and jumps that Recall put back into the generation. It is a value.
type Recalled map[recalledKey]bool

type recalledKey struct{ chain, target string }

// Has reports whether rules of a chain were recalled, or a built-in chain's jump to target.
func (r Recalled) Has(chain, target string) bool { return r[recalledKey{chain, target}] }

// With returns the chains and jumps of both. One purge may cause several recalls.
func (r Recalled) With(more Recalled) Recalled {
	all := Recalled{}
	maps.Copy(all, r)
	maps.Copy(all, more)
	return all
}

// Recall puts the rules of one table's removals back into the generation, the newest removal
// first. It also returns the chains and jumps that it put back. purged reports whether no owner
// made the i-th removal from a chain. A chain that another process has changed since stays as
// it is, unless many owners share it; a nil shared means none.
func (l Learned) Recall(list []Removal, purged func(i int, chain string) bool, shared func(chain string) bool) (Learned, Recalled) {
	recalled := Recalled{}
	if len(list) == 0 {
		return l, recalled
	}
	id := list[0].Table
	section := l.Generation[id]
	chains, jumps := slices.Clone(section.Chains), section.Jumps
	at := make(map[string]int, len(chains))
	for i, c := range chains {
		at[c.Name] = i
	}
	for i, r := range list {
		for _, c := range r.Chains {
			if !purged(i, c.Chain) {
				continue
			}
			switch n, stands := at[c.Chain]; {
			case !stands && c.gone:
				at[c.Chain] = len(chains)
				chains = append(chains, rules.Chain{Name: c.Chain, Rules: c.was})
			case !stands || chains[n].LeftOut():
				continue
			case c.gone || !rules.EqualRules(chains[n].Rules, c.is) && (shared == nil || !shared(c.Chain)):
				continue
			default:
				chains[n].Rules = withMissing(chains[n].Rules, c.was)
			}
			recalled[recalledKey{chain: c.Chain}] = true
		}
		before := jumps
		jumps = keepJumps(r.jumps, jumps, func(h rules.Jump) bool {
			return slices.ContainsFunc(r.Jumps, h.Same) && purged(i, h.Chain) && !superseded(r.jumps, before, h)
		})
		for _, h := range jumps {
			if len(jumps) > len(before) && !slices.ContainsFunc(before, h.Same) {
				recalled[recalledKey{h.Chain, h.Into()}] = true
			}
		}
		if len(recalled) > 0 {
			section.DependsOn = union(section.DependsOn, r.dependsOn)
		}
	}
	if len(recalled) == 0 {
		return l, recalled
	}
	section.Chains, section.Jumps = chains, jumps
	l.Generation = l.Generation.With(id, section)
	return l, recalled
}

// superseded reports whether now has a jump to the target of h that before lacks: its owner
// rewrote it, so Recall leaves h out.
func superseded(before, now []rules.Jump, h rules.Jump) bool {
	return !h.Named && slices.ContainsFunc(now, func(k rules.Jump) bool {
		return k.Chain == h.Chain && k.Rule.Target == h.Rule.Target && !slices.ContainsFunc(before, k.Same)
	})
}

// withMissing returns standing with the rules of wanted that it lacks, each behind the rule
// that preceded it. Recall restores a chain's rules with it.
func withMissing(standing, wanted []rules.Rule) []rules.Rule {
	l := newLayout(standing, wanted)
	next := 0
	for i, r := range wanted {
		if l.at[i] < 0 {
			l.insert(next, r)
			next++
			continue
		}
		next = l.at[i] + 1
	}
	all := make([]rules.Rule, len(l.slots))
	for i, s := range l.slots {
		all[i] = s.rule
	}
	return all
}
