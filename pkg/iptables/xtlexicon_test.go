package iptables

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// sampleText is iptables' output for sampleTable.
func sampleText() rules.Ruleset {
	t := rules.NewTable(rules.Filter)
	t.Add(rules.Chain{Name: "INPUT", Policy: "ACCEPT", Rules: []rules.Rule{
		{Spec: `-m comment --comment "drop it" -j ACCEPT`, Target: "ACCEPT"},
		{Spec: "-p tcp -m tcp -m comment --comment witness"},
	}})
	t.Add(rules.Chain{Name: "OUTPUT", Policy: "ACCEPT"})
	t.Add(rules.Chain{Name: "X", Rules: []rules.Rule{{Spec: "-m comment --comment nonce"}}})
	t.Add(rules.Chain{Name: "EMPTY"})
	return rules.Ruleset{rules.Filter: t}
}

func nothingEarlier(rules.TableName) *rules.Table { return nil }

// named walks tables and names their rules.
func named(t *testing.T, l *xtLexicon, family rules.Family, info xtInfo, data []byte) xtFamily {
	t.Helper()
	table, err := nameTable(family, rules.Filter, info, data, l, nil)
	if err != nil {
		t.Fatal(err)
	}
	return xtFamily{tables: []xtTable{table}}
}

func TestXTLexiconSaysWhatWasPrintedOfTheSame(t *testing.T) {
	for _, family := range rules.Families() {
		l := newXTLexicon(false)
		info, data := sampleTable(family)
		walked := named(t, l, family, info, data)
		if set, known := l.ruleset(walked, nothingEarlier); known {
			t.Errorf("%s: it knows what nobody told it: %v", family, set)
		}
		l.learn(walked, sampleText())
		before := sampleText()
		set, known := l.ruleset(named(t, l, family, info, data), func(rules.TableName) *rules.Table { return before[rules.Filter] })
		if diff := cmp.Diff(spelt(sampleText(), nil), spelt(set, nil)); diff != "" || !known {
			t.Errorf("%s: known %t (-want +got):\n%s", family, known, diff)
		}
		if got, want := set[rules.Filter].Chain("X").Rules, before[rules.Filter].Chain("X").Rules; &got[0] != &want[0] {
			t.Errorf("%s: a chain that is as before is not the same memory", family)
		}
		data[0]++ // an address of the first rule
		if set, known := l.ruleset(named(t, l, family, info, data), nothingEarlier); known {
			t.Errorf("%s: it knows a rule that it never met: %v", family, set)
		}
	}
}

// The printed rules must have the bytes' comment and target, the same number of
// rules, and always the same words.
func TestXTLexiconDoubts(t *testing.T) {
	for name, wrong := range map[string]rules.Rule{
		"another comment": {Spec: "-m comment --comment ecnon"},
		"no comment":      {Spec: "-p tcp"},
		"a target":        {Spec: "-m comment --comment nonce -j ACCEPT", Target: "ACCEPT"},
		"no words":        {Spec: `-m comment --comment "nonce`},
		"two rules":       {},
		"another text":    {Spec: "-s 10.0.0.1/32 -m comment --comment nonce"},
	} {
		l := newXTLexicon(false)
		info, data := sampleTable(rules.IPv4)
		walked, printed := named(t, l, rules.IPv4, info, data), sampleText()
		switch x := printed[rules.Filter].Chain("X"); name {
		case "two rules":
			x.Rules = append(x.Rules, x.Rules[0])
		case "another text":
			l.learn(walked, printed)
			fallthrough
		default:
			x.Rules = []rules.Rule{wrong}
		}
		l.learn(walked, printed)
		if set, known := l.ruleset(walked, nothingEarlier); known {
			t.Errorf("%s: it believes %v", name, set[rules.Filter].Chain("X").Rules)
		}
	}
}

// Odd entries have no words. These are a chain with an end that iptables does not
// know, a verdict without a name, and a jump into a chain's middle.
func TestXTLexiconLeavesOddTablesToIptables(t *testing.T) {
	build := func(policy, end, goal int32) (xtInfo, []byte) {
		b := xtBuilder{layout: xtLayoutOf(rules.IPv4)}
		info := xtInfo{validHooks: 1 << 1}
		info.hookEntry[1] = b.add(verdict(goal))
		b.add(verdict(policy))
		b.add(errorTarget("X"))
		b.add(verdict(end))
		b.add(errorTarget(xtError))
		return info, b.data
	}
	for _, c := range []struct {
		name              string
		policy, end, goal int32
		text              rules.Rule
		known             bool
	}{
		{"plain", -2, -5, -2, rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}, true},
		{"a policy that is none", -5, -5, -2, rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}, false},
		{"a user's chain with a policy", -2, -1, -2, rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}, false},
		{"QUEUE", -2, -5, -4, rules.Rule{Spec: "-j QUEUE", Target: "QUEUE"}, false},
		{"a jump into the middle", -2, -5, 8, rules.Rule{Spec: "-j X", Target: "X"}, false},
	} {
		l := newXTLexicon(false)
		info, data := build(c.policy, c.end, c.goal)
		table := rules.NewTable(rules.Filter)
		table.Add(rules.Chain{Name: "INPUT", Policy: "ACCEPT", Rules: []rules.Rule{c.text}})
		table.Add(rules.Chain{Name: "X"})
		walked := named(t, l, rules.IPv4, info, data)
		l.learn(walked, rules.Ruleset{rules.Filter: table})
		if _, known := l.ruleset(walked, nothingEarlier); known != c.known {
			t.Errorf("%s: known is %t, want %t", c.name, known, c.known)
		}
	}
}

// No kernel makes such tables. The lexicon must not name their rules, and must
// not panic.
func TestXTLexiconRefusesMalformedTables(t *testing.T) {
	layout := xtLayoutOf(rules.IPv4)
	stray := xtBuilder{layout: layout}
	stray.fallThrough()
	stray.add(verdict(-2))
	stray.add(errorTarget("X"))
	stray.add(verdict(-5))
	stray.add(errorTarget(xtError))
	if _, err := nameTable(rules.IPv4, rules.Filter, xtInfo{}, stray.data, newXTLexicon(false), nil); !errors.Is(err, errWalk) {
		t.Errorf("rules of no chain: %v", err)
	}
	endless := xtBuilder{layout: layout}
	endless.add(errorTarget("X"))
	endless.fallThrough()
	endless.add(verdict(-5))
	endless.add(errorTarget("Y"))
	endless.add(errorTarget("Z"))
	endless.add(verdict(-5))
	endless.add(errorTarget(xtError))
	l := newXTLexicon(false)
	walked := named(t, l, rules.IPv4, xtInfo{}, endless.data)
	l.learn(walked, sampleText())
	if set, known := l.ruleset(walked, nothingEarlier); known {
		t.Errorf("a chain without an end: %v", set)
	}
}

func TestXTLexiconForgetsWhatIsNotMetForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newXTLexicon(false)
		say := func(i int) (xtName, rules.Rule) {
			return xtName{key: l.hash(fmt.Sprint(i))}, rules.Rule{Spec: fmt.Sprintf("-s 10.0.%d.%d/32", i>>8, i&255)}
		}
		for i := range 2 * fewEntries {
			l.know(say(i))
		}
		time.Sleep(remember + 2*time.Second)
		for i := range 3 { // met again
			name, _ := say(i)
			l.rule(name.key, l.now())
		}
		l.learn(xtFamily{}, nil)
		if len(l.words) != 3 {
			t.Errorf("%d words are left, want 3", len(l.words))
		}
		for i := range 4 {
			name, want := say(i)
			got, known := l.rule(name.key, l.now())
			if known != (i < 3) || known && got != want {
				t.Errorf("rule %d is %v, %t", i, got, known)
			}
		}
	})
}

// iptables prints two rules in the same words, although they differ in relevant
// bytes. The second is opaque, and its chain does not count as the written one.
func TestXTLexiconComparesBytes(t *testing.T) {
	for _, family := range rules.Families() {
		l := newXTLexicon(false)
		info, data := sampleTable(family)
		l.learn(named(t, l, family, info, data), sampleText())
		data[0]++ // an address of the first rule
		walked := named(t, l, family, info, data)
		set, agreed := l.verify(walked, sampleText())
		reason, opaque := set[rules.Filter].Chain("INPUT").Rules[0].Opaque()
		if agreed || !opaque || !strings.Contains(reason, "other bytes") {
			t.Errorf("%s: the rule of another address is %q", family, set[rules.Filter].Chain("INPUT").Rules[0])
		}
		// Until another try succeeds the rule stays opaque, and nothing is
		// executed for it.
		l.learn(walked, set)
		again, known := l.ruleset(walked, nothingEarlier)
		if !known || again[rules.Filter].Chain("INPUT").Rules[0] != set[rules.Filter].Chain("INPUT").Rules[0] {
			t.Errorf("%s: learned, it is known %t as %v", family, known, again)
		}
	}
}
