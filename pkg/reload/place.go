package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A slot is one rule of a chain as the replay will leave it.
type slot struct {
	rule  rules.Rule
	fresh bool // the replay inserts it
}

// placeJumps returns the steps that insert the missing jumps of a built-in chain, and these jumps.
//
// A missing jump is placed next to a wanted jump with the same anchor, if one is in force, so that
// jumps keep their order. Otherwise its place is its anchor, or the top if the neighbour is gone.
// Steps use indexes only among rules in force: "-I CHAIN 3" into an empty chain would fail the
// whole table.
func placeJumps(chain string, standing []rules.Rule, wanted []rules.Jump) (steps []iptables.Step, placed []rules.Jump) {
	l := layoutOf(standing, wanted, chain)
	for i, h := range wanted {
		if l.slots[l.at[i]].fresh {
			placed = append(placed, h)
		}
	}
	return stepsFor(chain, l.slots), placed
}

// layoutOf returns the layout of a built-in chain with all of its wanted jumps. placeJumps
// makes the steps of it, and order the sequence in which gaps are searched.
func layoutOf(standing []rules.Rule, wanted []rules.Jump, chain string) *layout {
	l := newLayout(standing, jumpRulesIn(wanted, chain))
	for i, h := range wanted {
		if l.at[i] < 0 {
			to := l.inOrder(i, l.position(wanted, i))
			l.insert(to, h.Rule)
			l.at[i] = to
		}
	}
	return l
}

// A layout is a chain as a replay will leave it.
type layout struct {
	slots []slot
	at    []int // for each wanted rule, its index in slots; -1 if the chain lacks it
}

// newLayout returns the layout of a chain that is not changed yet. Each rule in force is matched
// once, the first of several equal rules first. A chain may have thousands of rules, so a wanted
// rule behind the first difference is looked up by its meaning.
func newLayout(standing, wanted []rules.Rule) *layout {
	l := &layout{slots: make([]slot, len(standing)), at: make([]int, len(wanted))}
	for i, r := range standing {
		l.slots[i] = slot{rule: r}
	}
	same := 0
	for same < len(standing) && same < len(wanted) && standing[same].Equal(wanted[same]) {
		l.at[same] = same
		same++
	}
	left := map[string][]int{}
	if same < len(wanted) {
		for j, r := range standing[same:] {
			left[r.Meaning()] = append(left[r.Meaning()], same+j)
		}
	}
	for i := same; i < len(wanted); i++ {
		l.at[i] = -1
		if len(left) == 0 {
			continue
		}
		if m := wanted[i].Meaning(); len(left[m]) > 0 {
			l.at[i], left[m] = left[m][0], left[m][1:]
		}
	}
	return l
}

// insert makes a rule the slot with index to, as a fresh one. It moves the slots behind it, and
// their indexes in at.
func (l *layout) insert(to int, r rules.Rule) {
	l.slots = slices.Insert(l.slots, to, slot{rule: r, fresh: true})
	for j := range l.at {
		if l.at[j] >= to {
			l.at[j]++
		}
	}
}

// inOrder returns the index nearest to the index to at which the i-th wanted rule keeps the
// wanted order. layoutOf inserts a jump there. Anchors of different times may contradict each
// other. If the rules in force are in another order, it returns to.
func (l *layout) inOrder(i, to int) int {
	first, last := 0, len(l.slots)
	for j, at := range l.at {
		switch {
		case at < 0:
		case j < i:
			first = max(first, at+1)
		case j > i:
			last = min(last, at)
		}
	}
	if first > last {
		return to
	}
	return min(max(to, first), last)
}

// position returns the index at which wanted[i] is to be inserted, by its neighbours and its
// anchor. inOrder corrects it.
func (l *layout) position(wanted []rules.Jump, i int) int {
	anchor, at := wanted[i].Anchor, l.at
	for j := i - 1; j >= 0; j-- {
		if at[j] >= 0 && wanted[j].Anchor == anchor {
			return at[j] + 1
		}
	}
	for j := i + 1; j < len(wanted); j++ {
		if at[j] >= 0 && wanted[j].Anchor == anchor {
			return at[j]
		}
	}
	switch anchor.Position {
	case rules.Bottom:
		return len(l.slots)
	case rules.Behind:
		n := slices.IndexFunc(l.slots, func(s slot) bool { return s.rule.Equal(anchor.Neighbour) })
		if n >= 0 {
			return n + 1
		}
		for j := i - 1; j >= 0; j-- {
			if at[j] >= 0 {
				return at[j] + 1
			}
		}
	}
	return 0
}

// stepsFor returns the steps that insert the fresh slots, for jumps and for merged chains. At
// the top it uses plain -I in reverse order, at the end -A, and in between -I with an index.
func stepsFor(chain string, slots []slot) []iptables.Step {
	insert := func(index int, r rules.Rule) iptables.Step {
		return iptables.Step{Verb: iptables.Insert, Chain: chain, Index: index, Rule: r}
	}
	var top, middle, bottom []iptables.Step
	head := 0
	for head < len(slots) && slots[head].fresh {
		top = append(top, insert(0, slots[head].rule))
		head++
	}
	slices.Reverse(top)
	tail := len(slots)
	for tail > head && slots[tail-1].fresh {
		tail--
	}
	for i := head; i < tail; i++ {
		if slots[i].fresh {
			middle = append(middle, insert(i+1, slots[i].rule))
		}
	}
	for _, s := range slots[tail:] {
		bottom = append(bottom, appendRule(chain, s.rule))
	}
	return slices.Concat(top, middle, bottom)
}
