package scenario

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Tables returns the content of one family's tables.
func Tables(ctx context.Context, f Flusher, family rules.Family) (rules.Ruleset, error) {
	text, err := f.Save(ctx, family)
	if err != nil {
		return nil, err
	}
	if strings.Contains(text, "is incompatible, use 'nft' tool") {
		return nil, fmt.Errorf("a table of %s cannot be saved:\n%s", family, text)
	}
	return savefile.Parse(text)
}

// A Want is the expected content of one family's tables after the repair of a flush.
type Want struct {
	// Protected is the content before the flush. Protected chains and jumps must be the same.
	Protected rules.Ruleset
	// Foreign is the content that the same flush leaves without canaryd. All other rules must
	// be the same.
	Foreign rules.Ruleset
	// Late means that the flush continues after the rules are back. Rules that it then adds
	// above or below the jumps stay there, even if they were elsewhere before.
	Late bool
	// Protects reports whether a chain is protected.
	Protects func(chain string) bool
	// MatchesPreset reports whether a preset or a word rule: names a rule of a built-in chain; nil
	// means none.
	MatchesPreset func(t rules.TableName, chain string, r rules.Rule) bool
}

// Compare returns a line for each difference between got and want. It ignores counters,
// canaryd's marks and other programs' canaries. In a built-in chain that lost no foreign rule,
// jumps and foreign rules must be in the old order. In others, each of the two kinds must be.
func Compare(want Want, got rules.Ruleset) []string {
	var c comparison
	c.want = want
	names := slices.Collect(maps.Keys(want.Protected))
	names = append(slices.AppendSeq(names, maps.Keys(want.Foreign)), slices.Collect(maps.Keys(got))...)
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		c.name = name
		c.before, c.control, c.got = want.Protected[name], want.Foreign[name], got[name]
		c.table()
	}
	return c.lines
}

type comparison struct {
	want                 Want
	name                 rules.TableName
	before, control, got *rules.Table
	lines                []string
}

func (c *comparison) say(format string, args ...any) {
	c.lines = append(c.lines, string(c.name)+": "+fmt.Sprintf(format, args...))
}

func (c *comparison) table() {
	for _, name := range rules.BuiltinChains(c.name) {
		c.builtin(name)
	}
	for _, name := range ChainNames(c.before, c.control, c.got) {
		switch {
		case rules.Builtin(c.name, name), strings.HasSuffix(name, "-CANARY"):
		case c.want.Protects(name):
			c.user("protected", name, c.before)
		default:
			c.user("foreign", name, c.control)
		}
	}
}

func (c *comparison) user(kind, name string, want *rules.Table) {
	wanted, got := want.Chain(name), c.got.Chain(name)
	switch {
	case wanted == nil && got != nil:
		c.say("%s chain %s is there and should not be", kind, name)
	case wanted != nil && got == nil:
		c.say("%s chain %s is missing", kind, name)
	case wanted != nil:
		c.sequence(kind, name, specs(wanted, all), specs(got, all))
	}
}

func (c *comparison) builtin(name string) {
	jump := func(r rules.Rule) bool {
		return c.want.Protects(r.Target) || c.want.MatchesPreset != nil && c.want.MatchesPreset(c.name, name, r)
	}
	foreign := func(r rules.Rule) bool { return !jump(r) }
	before, control, got := c.before.Chain(name), c.control.Chain(name), c.got.Chain(name)
	wrong := len(c.lines)
	c.sequence("jump", name, specs(before, jump), specs(got, jump))
	c.sequence("foreign", name, specs(control, foreign), specs(got, foreign))
	if want, is := Policy(control), Policy(got); want != is {
		c.say("the policy of %s is %s and should be %s", name, is, want)
	}
	if !c.want.Late && len(c.lines) == wrong && slices.Equal(specs(before, foreign), specs(control, foreign)) &&
		!slices.Equal(specs(before, all), specs(got, all)) {
		c.say("jumps of %s stand elsewhere among the foreign rules:\n  was %s\n  is  %s",
			name, strings.Join(specs(before, all), "\n      "), strings.Join(specs(got, all), "\n      "))
	}
}

// sequence compares two lists of rules.
func (c *comparison) sequence(kind, chain string, want, got []string) {
	wrong := len(c.lines)
	wanted, there := counts(want), counts(got)
	for _, spec := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(want, got)))) {
		switch w, g := wanted[spec], there[spec]; {
		case g == 0:
			c.say("%s rule of %s is missing: %s", kind, chain, spec)
		case w == 0:
			c.say("%s rule of %s is there and should not be: %s", kind, chain, spec)
		case w != g:
			c.say("%s rule of %s is there %d times and should be there %d times: %s", kind, chain, g, w, spec)
		}
	}
	if len(c.lines) == wrong && !slices.Equal(want, got) {
		c.say("%s rules of %s are in another order", kind, chain)
	}
}

func all(rules.Rule) bool { return true }

// specs returns the rules of a chain that keep selects, without canaryd's marks.
func specs(chain *rules.Chain, keep func(rules.Rule) bool) []string {
	if chain == nil {
		return nil
	}
	var list []string
	for _, r := range chain.Rules {
		if keep(r) && !isMark(r) {
			list = append(list, r.Spec)
		}
	}
	return list
}

// isMark reports whether the rule is canaryd's own, by its comment. It does not use pkg/canary,
// because that may be wrong.
func isMark(r rules.Rule) bool {
	comment, _ := r.Comment()
	return r.Target == "" && strings.HasPrefix(comment, "canaryd-")
}

// Policy returns a built-in chain's policy. On nft the chain may not exist, and then all
// packets pass.
func Policy(chain *rules.Chain) string {
	if chain == nil || chain.Policy == "" {
		return "ACCEPT"
	}
	return chain.Policy
}

func counts(list []string) map[string]int {
	n := map[string]int{}
	for _, s := range list {
		n[s]++
	}
	return n
}

// ChainNames returns the names of all chains of these tables, sorted. A table may be nil.
func ChainNames(tables ...*rules.Table) []string {
	var names []string
	for _, t := range tables {
		if t == nil {
			continue
		}
		for i := range t.Chains {
			names = append(names, t.Chains[i].Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
