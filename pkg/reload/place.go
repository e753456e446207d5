package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A slot is one rule of a chain as it will stand after a replay.
type slot struct {
	rule  rules.Rule
	fresh bool // the replay inserts it
}

// placeJumps returns the steps that insert the missing ones of a built-in chain's wanted jumps, and
// those jumps.
//
// A missing jump goes next to a wanted jump with the same anchor, if one stands, so that jumps keep
// their order. Otherwise it goes to its anchor, or to the top if the neighbour is gone. Steps use
// indexes only among standing rules: "-I CHAIN 3" into an empty chain would fail the whole table.
func placeJumps(chain string, standing []rules.Rule, wanted []rules.Jump) (steps []iptables.Step, placed []rules.Jump) {
	slots := make([]slot, len(standing))
	for i, r := range standing {
		slots[i] = slot{rule: r}
	}
	at := matchJumps(standing, wanted)
	for i, h := range wanted {
		if at[i] >= 0 {
			continue
		}
		to := position(slots, wanted, at, i)
		slots = slices.Insert(slots, to, slot{rule: h.Rule, fresh: true})
		for j := range at {
			if at[j] >= to {
				at[j]++
			}
		}
		at[i] = to
		placed = append(placed, h)
	}
	return stepsFor(chain, slots), placed
}

// matchJumps returns the index of the standing rule that is each wanted jump, or -1. Each standing
// rule is matched once.
func matchJumps(standing []rules.Rule, wanted []rules.Jump) []int {
	at := make([]int, len(wanted))
	used := make([]bool, len(standing))
	for i, h := range wanted {
		at[i] = -1
		for j, r := range standing {
			if !used[j] && r.Equal(h.Rule) {
				at[i], used[j] = j, true
				break
			}
		}
	}
	return at
}

// position returns the index at which wanted[i] is to be inserted.
func position(slots []slot, wanted []rules.Jump, at []int, i int) int {
	anchor := wanted[i].Anchor
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
		return len(slots)
	case rules.Behind:
		n := slices.IndexFunc(slots, func(s slot) bool { return s.rule.Equal(anchor.Neighbour) })
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

// stepsFor returns the steps that insert the fresh slots: plain -I in reverse order at the top, -A
// at the end, and -I with an index in between.
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
