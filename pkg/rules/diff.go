package rules

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A Difference lists all deviations of a table from the wanted section, the gravest first.
type Difference []Deviation

// A Deviation is a single difference between a table and the wanted section.
type Deviation struct {
	Kind  Kind
	Chain string
	// Rules holds the rule in question. For a chain it holds all rules that are lost with it,
	// or that it should not have.
	Rules []Rule
	// Wanted and Found are the rule's places in its chain, counted from 1. For a doubled rule
	// they are the numbers of its copies. A jump's place counts the chain's jumps only.
	Wanted, Found int
	// Anchor is the place that a missing jump had, or the place among the wanted rules where a
	// misplaced rule belongs.
	Anchor Anchor
}

// A Kind is the kind of a Deviation.
type Kind uint8

// The kinds of deviations, the gravest first.
const (
	ChainGone Kind = iota
	ChainEmptied
	JumpMissing
	RuleMissing
	JumpMisplaced
	RuleMisplaced
	JumpDoubled
	RuleDoubled
	JumpUnwanted
	RuleUnwanted
	ChainUnwanted
)

// Diff returns the differences between want and got, for the Drift of a table with declared
// rules. It compares rules by their meaning, and jumps by chain, rule and their order among
// themselves: other programs may put rules between them. It ignores policies.
func Diff(want, got Section) Difference {
	var d Difference
	found := make(map[string][]Rule, len(got.Chains))
	for _, c := range got.Chains {
		found[c.Name] = c.Rules
	}
	for _, c := range want.Chains {
		rs, ok := found[c.Name]
		delete(found, c.Name)
		switch {
		case !ok:
			d = append(d, Deviation{Kind: ChainGone, Chain: c.Name, Rules: c.Rules})
		case len(rs) == 0 && len(c.Rules) > 0:
			d = append(d, Deviation{Kind: ChainEmptied, Chain: c.Name, Rules: c.Rules})
		default:
			d = append(d, sequence(c.Name, c.Rules, rs)...)
		}
	}
	for _, c := range got.Chains {
		if rs, ok := found[c.Name]; ok {
			d = append(d, Deviation{Kind: ChainUnwanted, Chain: c.Name, Rules: rs})
		}
	}
	d = append(d, diffJumps(want.Jumps, got.Jumps)...)
	sorting.Stable(d, func(a, b Deviation) int { return int(a.Kind) - int(b.Kind) })
	return d
}

// diffJumps returns the differences of jumps for Diff: those of each built-in chain's jumps,
// with the kinds for jumps and the anchors of missing ones.
func diffJumps(want, got []Jump) Difference {
	var chains []string
	wanted, found := map[string][]Rule{}, map[string][]Rule{}
	anchors := map[string][]Anchor{}
	for _, h := range want {
		chains = append(chains, h.Chain)
		wanted[h.Chain] = append(wanted[h.Chain], h.Rule)
		anchors[h.Chain] = append(anchors[h.Chain], h.Anchor)
	}
	for _, h := range got {
		chains = append(chains, h.Chain)
		found[h.Chain] = append(found[h.Chain], h.Rule)
	}
	jump := map[Kind]Kind{
		RuleMissing: JumpMissing, RuleMisplaced: JumpMisplaced, RuleDoubled: JumpDoubled, RuleUnwanted: JumpUnwanted,
	}
	var d Difference
	for i, name := range chains {
		if slices.Index(chains, name) < i {
			continue
		}
		for _, v := range sequence(name, wanted[name], found[name]) {
			v.Kind = jump[v.Kind]
			if v.Kind == JumpMissing {
				v.Anchor = anchors[name][v.Wanted-1]
			}
			d = append(d, v)
		}
	}
	return d
}

// sequence compares the rules of one chain for Diff; nil if they are equal in the same
// order.
func sequence(chain string, want, got []Rule) Difference {
	if EqualRules(want, got) {
		return nil
	}
	places := map[string][]int{} // places in got of each meaning that are not taken yet
	count := map[string]int{}
	for i, r := range got {
		m := r.Meaning()
		places[m] = append(places[m], i)
		count[m]++
	}
	var d Difference
	wanted := map[string]int{} // how often each meaning is wanted
	from := map[int]int{}      // place in got to place in want
	for i, r := range want {
		m := r.Meaning()
		wanted[m]++
		if len(places[m]) == 0 {
			d = append(d, Deviation{Kind: RuleMissing, Chain: chain, Rules: []Rule{r}, Wanted: i + 1})
			continue
		}
		from[places[m][0]] = i
		places[m] = places[m][1:]
	}
	reported := map[string]bool{}
	order := make([]int, 0, len(from)) // places in want, in the order of got
	for i, r := range got {
		m := r.Meaning()
		j, ok := from[i]
		switch n := wanted[m]; {
		case ok && n == count[m]:
			order = append(order, j)
		case n == 0:
			d = append(d, Deviation{Kind: RuleUnwanted, Chain: chain, Rules: []Rule{r}, Found: i + 1})
		case n < count[m] && !reported[m]:
			// Nothing shows which of the copies is the surplus one.
			reported[m] = true
			d = append(d, Deviation{Kind: RuleDoubled, Chain: chain, Rules: []Rule{r}, Wanted: n, Found: count[m]})
		}
	}
	return append(d, misplaced(chain, want, order, from)...)
}

// misplaced returns the smallest set of rules that must move to put the chain in order.
// order has places in want, in the order of got; from has the place in want of each place in
// got. sequence calls it.
func misplaced(chain string, want []Rule, order []int, from map[int]int) Difference {
	stay := longestRise(order)
	found := make(map[int]int, len(from))
	for g, w := range from {
		found[w] = g
	}
	var d Difference
	for i, w := range order {
		if !stay[i] {
			belongs := Anchor{Position: Top}
			if w > 0 {
				belongs = Anchor{Position: Behind, Neighbour: want[w-1]}
			}
			d = append(d, Deviation{
				Kind: RuleMisplaced, Chain: chain, Rules: []Rule{want[w]}, Wanted: w + 1, Found: found[w] + 1, Anchor: belongs,
			})
		}
	}
	return d
}

// longestRise marks the elements of a longest rising subsequence of distinct numbers
// (patience sorting). misplaced leaves these rules where they are.
func longestRise(list []int) []bool {
	var piles []int // index of each pile's top
	before := make([]int, len(list))
	for i, n := range list {
		p, _ := slices.BinarySearchFunc(piles, n, func(top, n int) int { return list[top] - n })
		before[i] = -1
		if p > 0 {
			before[i] = piles[p-1]
		}
		if p == len(piles) {
			piles = append(piles, i)
		} else {
			piles[p] = i
		}
	}
	rises := make([]bool, len(list))
	if len(piles) > 0 {
		for i := piles[len(piles)-1]; i >= 0; i = before[i] {
			rises[i] = true
		}
	}
	return rises
}

// String returns the lines of d, separated by line breaks.
func (d Difference) String() string { return strings.Join(d.Lines(), "\n") }

// Lines describes d for people and logs: one line for each deviation, and one for each rule
// of a chain that is gone or empty.
func (d Difference) Lines() []string {
	var lines []string
	for _, v := range d {
		lines = append(lines, v.lines()...)
	}
	return lines
}

// lines describes one deviation for Lines, in one line or, for a chain, with a line for each
// rule.
func (v Deviation) lines() []string {
	rule := ""
	if len(v.Rules) == 1 {
		rule = Jump{Chain: v.Chain, Rule: v.Rules[0]}.String()
	}
	switch v.Kind {
	case ChainGone:
		return v.withRules("chain %s is gone", "with")
	case ChainEmptied:
		return v.withRules("chain %s is empty", "without")
	case ChainUnwanted:
		return v.withRules("chain %s is not wanted", "with")
	case JumpMissing:
		return []string{"jump is missing: " + rule + v.Anchor.suffix("")}
	case RuleMissing:
		return []string{fmt.Sprintf("rule %d is missing: %s", v.Wanted, rule)}
	case JumpMisplaced:
		return []string{fmt.Sprintf("jump %d is out of order: %s%s", v.Found, rule, v.Anchor.suffix("belongs "))}
	case RuleMisplaced:
		return []string{fmt.Sprintf("rule %d is out of order: %s%s", v.Found, rule, v.Anchor.suffix("belongs "))}
	case JumpDoubled:
		return []string{fmt.Sprintf("jump is there %s instead of %s: %s", times(v.Found), times(v.Wanted), rule)}
	case RuleDoubled:
		return []string{fmt.Sprintf("rule is there %s instead of %s: %s", times(v.Found), times(v.Wanted), rule)}
	case JumpUnwanted:
		return []string{"jump is not wanted: " + rule}
	default:
		return []string{fmt.Sprintf("rule %d is not wanted: %s", v.Found, rule)}
	}
}

// withRules describes a chain by format, which gets its name, and lists its rules behind the
// word with ("with" or "without").
func (v Deviation) withRules(format, with string) []string {
	what := fmt.Sprintf("%s its %d rules:", with, len(v.Rules))
	switch len(v.Rules) {
	case 0:
		return []string{fmt.Sprintf(format, v.Chain)}
	case 1:
		what = with + " its rule:"
	}
	lines := []string{fmt.Sprintf(format, v.Chain) + " " + what}
	for _, r := range v.Rules {
		lines = append(lines, "  "+Jump{Chain: v.Chain, Rule: r}.String())
	}
	return lines
}

// suffix describes the place that a rule had or belongs to, in brackets behind its line;
// verb is "belongs " or "". It is "" if the anchor is unknown.
func (a Anchor) suffix(verb string) string {
	switch a.Position {
	case Top, Bottom:
		return fmt.Sprintf(" (%sat the %s)", verb, a.Position)
	case Behind:
		return fmt.Sprintf(" (%sbehind %s)", verb, a.Neighbour.Spec)
	default:
		return ""
	}
}

// times writes a number of copies for people: once, twice, 3 times.
func times(n int) string {
	switch n {
	case 1:
		return "once"
	case 2:
		return "twice"
	default:
		return fmt.Sprintf("%d times", n)
	}
}
