package reload

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ShrinkDelay is how long a change that empties or removes chains, or takes
// half a table, must stand before it is adopted: a flush that comes one table
// or one command at a time begins exactly like such a change.
const ShrinkDelay = 2 * time.Second

// Learned is the generation as the live kernel teaches it. It is a value:
// Learn returns the next one.
type Learned struct {
	Generation rules.Generation
	// shrunk tells since when a chain ("" for half the table) has been seen
	// with less than the generation still holds.
	shrunk map[shrinkKey]time.Time
}

type shrinkKey struct {
	family rules.Family
	table  rules.TableName
	chain  string
}

// Knows reports whether anything was ever learned of the table.
func (l Learned) Knows(f rules.Family, t rules.TableName) bool {
	_, ok := l.Generation[f.Table(t)]
	return ok
}

// Shrunk returns since when a chain has been seen empty, or not at all, that the
// generation still holds; zero if it is not so.
func (l Learned) Shrunk(f rules.Family, t rules.TableName, chain string) time.Time {
	return l.shrunk[shrinkKey{f, t, chain}]
}

// Learn adopts what a read under standing marks showed of one table. Growth
// and changed rules count at once; what shrank is adopted once it has stood
// for ShrinkDelay, and until then the former content is kept. Jumps in
// finding.Waiting are kept as well, and so are the chains that they are missing from.
//
// The zero time means that nothing waits; else Learn must be called again with
// a fresh read at that time.
func (l Learned) Learn(f rules.Family, t rules.TableName, seen rules.Section, finding canary.Finding, now time.Time) (Learned, time.Time) {
	old, known := l.Generation[f.Table(t)]
	next := Learned{Generation: l.Generation, shrunk: make(map[shrinkKey]time.Time)}
	for k, since := range l.shrunk {
		if k.family != f || k.table != t {
			next.shrunk[k] = since
		}
	}
	if !known {
		next.Generation = l.Generation.With(f.Table(t), seen)
		return next, time.Time{}
	}
	var due time.Time
	stands := func(chain string) bool {
		k := shrinkKey{f, t, chain}
		since, before := l.shrunk[k]
		if !before {
			since = now
		}
		next.shrunk[k] = since // also once it stood: what waits beside it must not set it back
		if now.Sub(since) >= ShrinkDelay {
			return true
		}
		if at := since.Add(ShrinkDelay); due.IsZero() || at.Before(due) {
			due = at
		}
		return false
	}
	waits := func(chain string) bool {
		return slices.ContainsFunc(finding.Waiting, func(h rules.Jump) bool { return h.Chain == chain })
	}
	count := sizeBefore(old, seen)
	half := count >= 2 && 2*seen.RuleCount() < count && !stands("")
	merged := seen
	kept := map[string]bool{}
	at := make(map[string]int, len(merged.Chains))
	for i, c := range merged.Chains {
		at[c.Name] = i
	}
	for _, c := range old.Chains {
		i, there := at[c.Name]
		// An empty chain that is gone waits as well: KUBE-IPTABLES-HINT never
		// holds a rule, and a firewall's restart deletes it in a first step.
		if there && (len(c.Rules) == 0 || len(merged.Chains[i].Rules) > 0) || stands(c.Name) && !waits(c.Name) {
			continue
		}
		if len(kept) == 0 {
			merged.Chains = slices.Clone(seen.Chains)
		}
		kept[c.Name] = true
		if there {
			merged.Chains[i] = c
		} else {
			merged.Chains = append(merged.Chains, c)
		}
	}
	if half {
		return next, due // the clocks of its chains run all the same
	}
	merged.Jumps = keepJumps(old.Jumps, seen.Jumps, func(h rules.Jump) bool {
		return kept[h.Into()] || slices.ContainsFunc(finding.Waiting, h.Same)
	})
	merged.Jumps = keepAnchors(old.Jumps, merged.Jumps, seen.Alone)
	if len(kept) > 0 {
		merged.DependsOn = union(old.DependsOn, seen.DependsOn)
	}
	// Also where it equals old: what was seen last is in memory anyway.
	next.Generation = l.Generation.With(f.Table(t), merged)
	return next, due
}

// sizeBefore returns how many rules old has, but for those of chains that are left out by now: they
// grew, and what was known of them must not be kept.
func sizeBefore(old, seen rules.Section) int {
	n := old.RuleCount()
	for _, c := range seen.Chains {
		if c.LeftOut() {
			before, _ := old.Chain(c.Name)
			n -= len(before.Rules)
		}
	}
	return n
}

// keepJumps returns seen with those of old's missing jumps that keep wants,
// each behind the nearest jump that it stood behind before.
func keepJumps(old, seen []rules.Jump, keep func(rules.Jump) bool) []rules.Jump {
	merged := slices.Clone(seen)
	for i, h := range old {
		if !keep(h) || slices.ContainsFunc(merged, h.Same) {
			continue
		}
		to := 0
		for j := i - 1; j >= 0 && to == 0; j-- {
			to = slices.IndexFunc(merged, old[j].Same) + 1
		}
		merged = slices.Insert(merged, to, h)
	}
	return merged
}

// keepAnchors returns seen with old's anchors in the chains in which jumps are alone: a
// flusher that comes twice, as firewalld does when it reloads, leaves them alone
// in between, and a jump from the bottom would be put above everything when it
// is lost again. Jumps that were put in another order since are where their
// owner wants them.
func keepAnchors(old, seen []rules.Jump, alone []string) []rules.Jump {
	merged := slices.Clone(seen)
	order := []rules.Position{rules.Top, rules.Behind, rules.Bottom}
	for _, chain := range alone {
		anchors, last := map[int]rules.Anchor{}, 0
		for i, h := range merged {
			if h.Chain != chain {
				continue
			}
			anchors[i] = h.Anchor
			if k := slices.IndexFunc(old, h.Same); k >= 0 {
				anchors[i] = old[k].Anchor
			}
			rank := slices.Index(order, anchors[i].Position)
			if rank < last {
				anchors = nil
				break
			}
			last = rank
		}
		for i, anchor := range anchors {
			merged[i].Anchor = anchor
		}
	}
	return merged
}

func union(a, b []string) []string {
	all := append(slices.Clone(a), b...)
	slices.Sort(all)
	return slices.Compact(all)
}
