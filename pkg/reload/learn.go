package reload

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// shrinkDelay is how long a change must last before it is learned, if it empties or removes chains
// or removes half a table. A flush that proceeds table by table, or command by command, begins
// exactly like such a change.
const shrinkDelay = 2 * time.Second

// A Learned is the generation that canaryd learned from the kernel's tables. It is a value: Learn
// returns the next one.
type Learned struct {
	Generation rules.Generation
	// shrunk has the time since when a read showed fewer rules of a chain, or of half the table
	// (""), than the generation has.
	shrunk map[shrinkKey]time.Time
}

type shrinkKey struct {
	table rules.TableID
	chain string
}

// Knows reports whether the table was ever learned.
func (l Learned) Knows(f rules.Family, t rules.TableName) bool {
	_, ok := l.Generation[f.Table(t)]
	return ok
}

// Without returns l as if a table was never learned. The daemon calls it for a table that is
// guarded on demand and holds nothing to guard.
func (l Learned) Without(id rules.TableID) Learned {
	l.Generation = l.Generation.Clone()
	delete(l.Generation, id)
	return l
}

// Shrunk returns the time since when a chain of the generation has been seen empty or missing. It
// is zero for every other chain.
func (l Learned) Shrunk(f rules.Family, t rules.TableName, chain string) time.Time {
	return l.shrunk[shrinkKey{f.Table(t), chain}]
}

// Learn takes a read of one table into the generation. The table's marks were in force during the
// read. Learn accepts added and changed rules at once. It accepts removals after shrinkDelay, and
// keeps the former content until then. It also keeps the jumps in finding.Waiting and the chains
// that these are missing from.
//
// The time is zero if nothing waits. Otherwise the caller must pass another read to Learn at that
// time.
func (l Learned) Learn(f rules.Family, t rules.TableName, seen rules.Section, finding canary.Finding, now time.Time) (Learned, time.Time) {
	id := f.Table(t)
	old, known := l.Generation[id]
	if known && len(finding.Waiting) == 0 && old.Same(seen) && !l.shrinks(id) {
		return l, time.Time{}
	}
	next := Learned{Generation: l.Generation, shrunk: make(map[shrinkKey]time.Time)}
	maps.Copy(next.shrunk, l.shrunk)
	maps.DeleteFunc(next.shrunk, func(k shrinkKey, _ time.Time) bool { return k.table == id })
	if !known {
		next.Generation = l.Generation.With(id, seen)
		return next, time.Time{}
	}
	clocks := shrinking{id, l.shrunk, next.shrunk, now, time.Time{}}
	waits := func(chain string) bool {
		return slices.ContainsFunc(finding.Waiting, func(h rules.Jump) bool { return h.Chain == chain })
	}
	count := sizeBefore(old, seen)
	half := count >= 2 && 2*seen.RuleCount() < count && !clocks.stood("")
	merged := seen
	var kept map[string]bool
	merged.Chains, kept = keepShrunk(old.Chains, seen.Chains, func(chain string) bool { return clocks.stood(chain) && !waits(chain) })
	if half {
		return next, clocks.due // the clocks of its chains continue
	}
	merged.Jumps = keepJumps(old.Jumps, seen.Jumps, func(h rules.Jump) bool {
		return kept[h.Into()] || slices.ContainsFunc(finding.Waiting, h.Same)
	})
	merged.Jumps = keepAnchors(old.Jumps, merged.Jumps, seen.Alone)
	if len(kept) > 0 {
		dropDangling(old.Chains, merged.Chains, kept)
		merged.LedTo = keepLedTo(old, seen, kept)
		merged.DependsOn = union(old.DependsOn, seen.DependsOn)
	}
	merged.DependsOn = merged.NotLedTo(merged.DependsOn)
	// The new section is kept even if it equals the old one, because the last read is in memory
	// anyway.
	next.Generation = l.Generation.With(id, merged)
	return next, clocks.due
}

// shrinks reports whether Learn waits with a removal from a table.
func (l Learned) shrinks(id rules.TableID) bool {
	for k := range l.shrunk {
		if k.table == id {
			return true
		}
	}
	return false
}

// shrinking has the clocks of the parts of one table in which a read showed fewer rules.
type shrinking struct {
	table        rules.TableID
	before, next map[shrinkKey]time.Time // since when, for the last read and for this one
	now          time.Time
	due          time.Time // when the first of these parts has been smaller for shrinkDelay
}

// stood reports whether a chain, or half the table (""), has been smaller for shrinkDelay.
// Learn then accepts the removal. Until then, due says when to look again.
func (s *shrinking) stood(chain string) bool {
	k := shrinkKey{s.table, chain}
	since, before := s.before[k]
	if !before {
		since = s.now
	}
	s.next[k] = since // even after shrinkDelay: other changes that wait must not restart this clock
	if s.now.Sub(since) >= shrinkDelay {
		return true
	}
	if at := since.Add(shrinkDelay); s.due.IsZero() || at.Before(s.due) {
		s.due = at
	}
	return false
}

// keepShrunk returns the chains that were seen. It adds the chains of old that are empty or
// missing now, unless counts accepts that, and returns their names. Learn keeps their jumps,
// too. seen stays as it is.
func keepShrunk(old, seen []rules.Chain, counts func(chain string) bool) (chains []rules.Chain, kept map[string]bool) {
	chains, kept = seen, map[string]bool{}
	for _, changed := range rules.ChangedChains(old, seen) {
		if changed.Was < 0 {
			break // old has no more chains
		}
		c, i := old[changed.Was], changed.Is
		there := i >= 0
		// A missing chain waits even if it was empty. KUBE-IPTABLES-HINT never holds a rule, and
		// the first step of a firewall's restart deletes it.
		if there && (len(c.Rules) == 0 || len(seen[i].Rules) > 0) || counts(c.Name) {
			continue
		}
		if len(kept) == 0 {
			chains = slices.Clone(seen)
		}
		kept[c.Name] = true
		if there {
			chains[i] = c
		} else {
			chains = append(chains, c)
		}
	}
	return chains, kept
}

// dropDangling removes from kept chains the rules that lead to a chain of old whose removal Learn
// has accepted. The kernel deletes a chain only after all rules that lead there, so that the owner
// has removed these, too. A replay could not write them.
func dropDangling(old, chains []rules.Chain, kept map[string]bool) {
	gone := map[string]bool{}
	for _, c := range old {
		gone[c.Name] = true
	}
	for _, c := range chains {
		delete(gone, c.Name)
	}
	for i, c := range chains {
		if len(gone) > 0 && kept[c.Name] {
			chains[i].Rules = slices.DeleteFunc(slices.Clone(c.Rules), func(r rules.Rule) bool { return gone[r.Target] })
		}
	}
}

// sizeBefore returns how many rules old has, without those of chains that are left out by now.
// Such a chain grew, and its former rules must not be kept. If half of the rules are gone,
// Learn waits.
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

// keepJumps returns seen, with the missing jumps of old that keep selects. Each is placed
// behind the nearest jump that preceded it in old. Learn, Recall and Supplement keep lost jumps
// so.
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

// keepAnchors returns seen, with old's anchors for the jumps of the chains in alone, which hold
// nothing else. A flusher that flushes twice, such as firewalld during a reload, leaves jumps
// alone in between. With an anchor from that read, a replay would put a jump from the bottom
// above everything. Jumps whose order has changed stay where their owner put them.
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

// Grown returns old, with the chains and jumps that only seen has, and with the rules added to
// chains that still have all former ones. It takes nothing away: seen may be half of a removal.
// After a flush the daemon passes the table as it was right before, so that a replay has the
// newest rules.
func Grown(old, seen rules.Section) rules.Section {
	grown, more := old, false
	grown.Chains = slices.Clone(old.Chains)
	at := make(map[string]int, len(old.Chains))
	for i, c := range old.Chains {
		at[c.Name] = i
	}
	for _, c := range seen.Chains {
		switch i, there := at[c.Name]; {
		case !there:
			grown.Chains, more = append(grown.Chains, c), true
		case len(c.Rules) > len(old.Chains[i].Rules) && holds(c.Rules, old.Chains[i].Rules):
			grown.Chains[i], more = c, true
		}
	}
	grown.Jumps = keepJumps(seen.Jumps, old.Jumps, func(rules.Jump) bool { return true })
	if !more && len(grown.Jumps) == len(old.Jumps) {
		return old
	}
	grown.LedTo = union(old.LedTo, seen.LedTo)
	grown.DependsOn = grown.NotLedTo(union(old.DependsOn, seen.DependsOn))
	return grown
}

// Cut returns old without the rules, chains and jumps that seen lacks, where removed reports that
// their owner has removed them. removed gets a chain, or a built-in chain and the target of its
// jump. A chain stays if a remaining rule leads there. After Grown, the daemon passes the table as
// it was right before a flush.
func Cut(old, seen rules.Section, removed func(chain, target string) bool) rules.Section {
	cut := old
	cut.Jumps = slices.DeleteFunc(slices.Clone(old.Jumps), func(h rules.Jump) bool {
		return !slices.ContainsFunc(seen.Jumps, h.Same) && removed(h.Chain, h.Into())
	})
	cut.Chains = slices.Clone(old.Chains)
	gone := map[string]bool{}
	for i, c := range old.Chains {
		now, stands := seen.Chain(c.Name)
		switch {
		case stands && (now.LeftOut() || holds(now.Rules, c.Rules)) || !removed(c.Name, ""):
		case stands:
			cut.Chains[i] = now
		default:
			gone[c.Name] = true
		}
	}
	for _, h := range cut.Jumps {
		delete(gone, h.Into())
	}
	for before := -1; before != len(gone); { // a chain that stays may lead to others
		before = len(gone)
		for _, c := range cut.Chains {
			for _, r := range c.Rules {
				if !gone[c.Name] {
					delete(gone, r.Target)
				}
			}
		}
	}
	cut.Chains = slices.DeleteFunc(cut.Chains, func(c rules.Chain) bool { return gone[c.Name] })
	cut.LedTo = slices.DeleteFunc(slices.Clone(old.LedTo), func(name string) bool { return gone[name] })
	return cut
}

// holds reports whether a list has all rules of another one, in their order. Then Grown takes
// it as the grown chain.
func holds(list, part []rules.Rule) bool {
	for _, r := range list {
		if len(part) > 0 && part[0].Equal(r) {
			part = part[1:]
		}
	}
	return len(part) == 0
}

// keepLedTo returns seen's LedTo, with the chains of old's that Learn still keeps (kept). A
// chain that is protected by now is not added.
func keepLedTo(old, seen rules.Section, kept map[string]bool) []string {
	var names []string
	for _, name := range old.LedTo {
		if _, protected := seen.Chain(name); kept[name] && !protected {
			names = append(names, name)
		}
	}
	return union(seen.LedTo, names)
}

// union returns the elements of both lists, sorted, each once.
func union(a, b []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}
