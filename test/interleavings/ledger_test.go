package interleavings

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A writer is the kind of program that wrote.
type writer string

const (
	byOwner    writer = "owner"
	byFlusher  writer = "flusher"
	byStranger writer = "stranger"
	byCanaryd  writer = "canaryd"
)

// A place is a chain.
type place struct {
	family rules.Family
	table  rules.TableName
	chain  string
}

func (p place) String() string { return fmt.Sprintf("%s %s %s", p.family, p.table, p.chain) }

// A chapter has the ledger's facts about one protected chain.
type chapter struct {
	// versions are the owner's contents of the chain, in order. nil means deleted, and an empty
	// list means empty.
	versions [][]rules.Rule
	// captured is the version that canaryd has claimed to know, or -1.
	captured int
	// during: the newest version was written during an outage, so that canaryd can know it only
	// from the table.
	during bool
	// excused is the reason why canaryd may know an older version than it claimed, or "".
	excused string
}

func (c *chapter) newest() []rules.Rule { return c.versions[len(c.versions)-1] }

// find returns the newest version with that content, or -1.
func (c *chapter) find(content []rules.Rule) int {
	for i, v := range slices.Backward(c.versions) {
		if (v == nil) == (content == nil) && rules.EqualRules(v, content) {
			return i
		}
	}
	return -1
}

// partly reports whether the content is a version without some of its rules.
func (c *chapter) partly(content []rules.Rule) bool {
	return slices.ContainsFunc(c.versions, func(v []rules.Rule) bool {
		left := content
		for _, r := range v {
			if len(left) > 0 && r.Equal(left[0]) {
				left = left[1:]
			}
		}
		return content != nil && len(left) == 0
	})
}

// joins reports whether canaryd completed a shared chain correctly in which a pod was added
// since a flush. The present rules must keep their order. All rules of one version that canaryd
// may know must be added in their order, except for rules that lead to a missing chain.
func (c *chapter) joins(old, now []rules.Rule, is *rules.Table) bool {
	if len(old) == 0 {
		return false // without a new pod it must be a version
	}
	back := lacking(now, old)
	if len(back)+len(old) != len(now) || !rules.EqualRules(lacking(now, back), old) {
		return false
	}
	return slices.ContainsFunc(c.versions[max(c.captured, 0):], func(known []rules.Rule) bool {
		wanted := slices.DeleteFunc(lacking(known, old), func(r rules.Rule) bool { return is.Chain(r.Target) == nil })
		return rules.EqualRules(back, wanted)
	})
}

// lacking returns the rules of list that other does not have.
func lacking(list, other []rules.Rule) []rules.Rule {
	return slices.DeleteFunc(slices.Clone(list), func(r rules.Rule) bool { return slices.ContainsFunc(other, r.Equal) })
}

// A ledger records the writes of all programs, and finds forbidden writes of canaryd.
type ledger struct {
	fake     *iptablestest.Fake
	protects func(chain string) bool
	last     map[rules.Family]rules.Ruleset
	read     map[rules.Family]rules.Ruleset // last read of canaryd
	chapters map[place]*chapter
	// replaced are the tables that saved rules replaced, until canaryd claims to know
	// everything. To canaryd their content is old, whatever program wrote it.
	replaced map[place]bool
	outage   map[place]string // tables without canary: "emptied" or "deleted"
	// overwrites are newer writes that canaryd overwrote in the present restore. The result of
	// the restore shows whether that was allowed.
	overwrites map[rules.Family][]string
	violations []string
	raced      int // overwrites reported as raced
	stale      int // chains restored to a version from before the last one
	merged     int // chains with a pod added during an outage, next to the others' restored rules
	takings    []taking
	// missing is the time since which a table has no canary, on a clock that runs while canaryd
	// is awake.
	missing map[place]time.Duration
	awake   func() time.Duration
}

func newLedger(fake *iptablestest.Fake, protects func(string) bool, awake func() time.Duration) *ledger {
	l := &ledger{
		fake: fake, protects: protects, awake: awake, missing: map[place]time.Duration{}, last: map[rules.Family]rules.Ruleset{}, read: map[rules.Family]rules.Ruleset{},
		chapters: map[place]*chapter{}, replaced: map[place]bool{}, outage: map[place]string{}, overwrites: map[rules.Family][]string{},
	}
	for _, f := range fake.Families() {
		l.last[f] = rules.Ruleset{}
	}
	return l
}

func (l *ledger) violation(format string, args ...any) {
	l.violations = append(l.violations, fmt.Sprintf(format, args...))
}

func (l *ledger) chapter(p place) *chapter {
	c := l.chapters[p]
	if c == nil {
		c = &chapter{versions: [][]rules.Rule{nil}, captured: -1}
		l.chapters[p] = c
	}
	return c
}

// observe records the changes since the last call, made by who.
func (l *ledger) observe(who writer) {
	for _, f := range l.fake.Families() {
		snapshot, err := l.fake.Read(context.Background(), f)
		if err != nil {
			l.violation("the fake cannot be read: %v", err)
			return
		}
		for _, t := range protect.Always() {
			before, after := l.last[f][t], snapshot.Tables[t]
			for _, name := range scenario.ChainNames(before, after) {
				l.changed(who, place{f, t, name}, before, after)
			}
		}
		l.last[f] = snapshot.Tables
		for _, t := range protect.Always() {
			l.noteOutage(place{f, t, ""}, content(snapshot.Tables[t].Chain(canary.DefaultChain)))
		}
	}
}

// noteOutage notes the extent of a flush by the rest of canaryd's canary. If the flush left
// chains, a missing chain was removed by its owner, and canaryd must know that. If it left
// none, no program can.
func (l *ledger) noteOutage(p place, mark []rules.Rule) {
	if _, since := l.missing[p]; len(mark) == 1 {
		delete(l.missing, p)
	} else if !since {
		l.missing[p] = l.awake()
	}
	switch {
	case len(mark) > 0:
		delete(l.outage, p)
	case mark != nil && l.outage[p] == "":
		l.outage[p] = "emptied"
		l.unknown(p)
	case mark == nil:
		if l.outage[p] == "" {
			l.unknown(p)
		}
		l.outage[p] = "deleted"
		for q, c := range l.chapters {
			if q.family == p.family && q.table == p.table && c.during && c.newest() == nil {
				c.excused = "it was removed after a flush that left no chains"
			}
		}
	}
}

// unmarked returns the longest time for which a canary is missing, and whether any is.
func (l *ledger) unmarked() (longest time.Duration, any bool) {
	for _, since := range l.missing {
		longest, any = max(longest, l.awake()-since), true
	}
	return longest, any
}

// once excuses the chains of an owner that writes only once, and wrote during an outage. It
// found nothing to remove, and added its rule to a missing chain.
func (l *ledger) once(f rules.Family) {
	if l.outage[place{f, rules.Nat, ""}] == "" {
		return
	}
	for q := range l.chapters {
		if q.family == f && q.table == rules.Nat && strings.HasPrefix(q.chain, "CNI-") {
			l.chapters[q].excused = "its owner wrote between the flush and the replay"
		}
	}
}

// unknown excuses the chains of a flushed table whose newest version canaryd did not know.
func (l *ledger) unknown(p place) {
	for q, c := range l.chapters {
		if q.family == p.family && q.table == p.table && !c.during && !l.heard(q, c) {
			c.excused = "the table was flushed before canaryd knew it"
		}
	}
}

// heard reports whether canaryd must know the newest version of a flushed chain: it has claimed
// that, or the backend is nft. On nft that version must only have added rules to each version
// that canaryd may know, while its table was intact.
func (l *ledger) heard(p place, c *chapter) bool {
	newest := len(c.versions) - 1
	if c.captured == newest {
		return true
	}
	if l.fake.Info().Backend != iptables.NFT || c.during || l.outage[place{p.family, p.table, ""}] != "" {
		return false
	}
	for _, known := range c.versions[max(c.captured, 0):newest] {
		if len(c.newest()) <= len(known) || !rules.EqualRules(lacking(known, c.newest()), nil) || !rules.EqualRules(known, lacking(c.newest(), lacking(c.newest(), known))) {
			return false
		}
	}
	c.captured = newest
	return true
}

func content(c *rules.Chain) []rules.Rule {
	switch {
	case c == nil:
		return nil
	case c.Rules == nil:
		return []rules.Rule{}
	default:
		return c.Rules
	}
}

// changed records the change of one chain of that table.
func (l *ledger) changed(who writer, p place, was, is *rules.Table) {
	before, after := was.Chain(p.chain), is.Chain(p.chain)
	old, now := content(before), content(after)
	if who == byFlusher || who == byStranger {
		l.noteTaking(p, old, now)
	}
	if (old == nil) == (now == nil) && rules.EqualRules(old, now) && scenario.Policy(before) == scenario.Policy(after) {
		return
	}
	switch {
	case who == byCanaryd && rules.Builtin(p.table, p.chain):
		l.builtin(p, before, after)
	case who == byCanaryd && !l.protects(p.chain):
		l.foreign(p, now)
	case !l.protects(p.chain):
	case who == byOwner && l.outage[place{p.family, p.table, ""}] != "" && old == nil && len(now) == 0:
		// The owner made a missing chain again, which shows nothing about its rules.
	case who == byOwner:
		l.noteHalf(p, old, now, is)
		c := l.chapter(p)
		if i := c.find(now); i != len(c.versions)-1 {
			c.versions = append(c.versions, now)
		}
		c.excused, c.during = "", l.outage[place{p.family, p.table, ""}] != ""
	case who == byFlusher || who == byStranger:
		if c := l.chapter(p); !l.heard(p, c) {
			c.excused = "it was flushed before canaryd knew it"
		}
	case who == byCanaryd:
		l.protected(p, old, now, is)
	}
}

// protected checks canaryd's change of a protected chain of that table.
func (l *ledger) protected(p place, old, now []rules.Rule, is *rules.Table) {
	c := l.chapter(p)
	i := c.find(now)
	newest := len(c.versions) - 1
	replaced := l.replaced[place{p.family, p.table, ""}]
	switch {
	case now != nil && len(now) == 0, i < 0 && c.partly(now):
		// A flush emptied the chain before canaryd knew more of it; or some of its rules are
		// refused while others write.
		l.stale++
		return
	case i < 0 && p.chain == hostports && l.outage[place{p.family, p.table, ""}] != "" && c.joins(old, now, is):
		// A pod was added between flush and replay. canaryd's result is the present will of all
		// owners.
		c.versions = append(c.versions, now)
		l.merged++
		return
	case i < 0:
		l.violation("%s got what its owner never wrote:\n  %s", p, texts(now))
		return
	case i == newest:
		return
	case i < c.captured && !replaced && c.excused == "" && !l.released(p, c, now):
		l.violation("%s got version %d of %d, and canaryd had said that it knew version %d:\n  %s", p, i+1, newest+1, c.captured+1, texts(now))
	}
	standing := (old == nil) == (c.newest() == nil) && rules.EqualRules(old, c.newest())
	switch {
	case !standing || len(old) == 0:
		l.stale++ // a flush took the newest version before canaryd knew it
	case replaced:
		c.excused = "it was written after saved rules were restored and before canaryd saw them"
	default:
		c.excused = "it was written over in a race"
		l.overwrites[p.family] = append(l.overwrites[p.family], fmt.Sprintf("%s: version %d was written over version %d, the newest:\n  was %s\n  is  %s", p, i+1, newest+1, texts(old), texts(now)))
	}
}

// released reports whether the content is all that canaryd can restore of a version after a
// flush that left the chains. Chains that were missing at canaryd's read were removed by their
// owner, so the rules that led to them stay away. The rest may equal an older version.
func (l *ledger) released(p place, c *chapter, content []rules.Rule) bool {
	if l.outage[place{p.family, p.table, ""}] != "emptied" || content == nil {
		return false
	}
	gone := func(r rules.Rule) bool {
		return l.protects(r.Target) && l.read[p.family][p.table].Chain(r.Target) == nil
	}
	return slices.ContainsFunc(c.versions[max(c.captured, 0):], func(v []rules.Rule) bool {
		return rules.EqualRules(content, slices.DeleteFunc(slices.Clone(v), gone))
	})
}

// foreign checks canaryd's change of an unprotected chain.
func (l *ledger) foreign(p place, now []rules.Rule) {
	ours := p.chain == canary.DefaultChain
	trial := strings.HasPrefix(p.chain, "KUBE-CANARYD-TRIAL") // a search for a refused rule
	nudge := p.chain == proxyCanary && len(now) == 0
	if !ours && !nudge && !trial {
		l.violation("%s is a stranger's and became\n  %s", p, texts(now))
	}
}

// builtin checks canaryd's change of a built-in chain. canaryd may change only jumps and marks,
// and may double no jump.
func (l *ledger) builtin(p place, before, after *rules.Chain) {
	others := func(c *rules.Chain) []rules.Rule {
		return slices.DeleteFunc(slices.Clone(content(c)), func(r rules.Rule) bool { return l.protects(r.Target) || canary.IsMark(r) })
	}
	if !rules.EqualRules(others(before), others(after)) || scenario.Policy(before) != scenario.Policy(after) {
		l.violation("%s: rules of strangers became\n  %s", p, texts(content(after)))
	}
}

// ended judges the overwrites by the result of the restore.
func (l *ledger) ended(written map[rules.Family]iptables.Written) {
	for f, list := range l.overwrites {
		if w := written[f]; w.Raced || w.Err != nil {
			l.raced += len(list)
			continue
		}
		for _, line := range list {
			l.violation("a newer write was written over, and nothing reported a race: %s", line)
		}
	}
	clear(l.overwrites)
}

// replace notes that saved rules replace a table.
func (l *ledger) replace(p place) {
	l.replaced[p] = true
}

// capture records that canaryd claims to know everything.
func (l *ledger) capture() {
	clear(l.replaced)
	for p, c := range l.chapters {
		now := content(l.last[p.family][p.table].Chain(p.chain))
		i := c.find(now)
		if i > c.captured || c.excused != "" {
			c.captured = i
		}
		if i == len(c.versions)-1 {
			c.excused = ""
		}
	}
}

// doubled returns the jumps that exist more than once.
func (l *ledger) doubled() []string {
	var found []string
	for f, set := range l.last {
		for t, table := range set {
			for _, name := range rules.BuiltinChains(t) {
				count := map[string]int{}
				for _, r := range content(table.Chain(name)) {
					if l.protects(r.Target) {
						count[r.Spec]++
					}
				}
				for spec, n := range count {
					if n > 1 {
						found = append(found, fmt.Sprintf("%s %s %s has %d times: %s", f, t, name, n, spec))
					}
				}
			}
		}
	}
	slices.Sort(found)
	return found
}

func texts(list []rules.Rule) string {
	if list == nil {
		return "(no chain)"
	}
	if len(list) == 0 {
		return "(no rules)"
	}
	var specs []string
	for _, r := range list {
		specs = append(specs, r.Spec)
	}
	return strings.Join(specs, "\n      ")
}
