package baseline

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// chainsOf returns a generation of filter's chains, each "NAME: rule; rule"; INPUT's are jumps.
func chainsOf(t testing.TB, lines ...string) rules.Generation {
	t.Helper()
	var s rules.Section
	for _, line := range lines {
		name, text, _ := strings.Cut(line, ": ")
		c := rules.Chain{Name: name}
		for _, spec := range strings.Split(text, "; ") {
			if spec == "" {
				continue
			}
			r, err := rules.ParseRule(spec)
			if err != nil {
				t.Fatal(err)
			}
			if name == "INPUT" {
				s.Jumps = append(s.Jumps, rules.Jump{Chain: name, Rule: r})
				continue
			}
			c.Rules = append(c.Rules, r)
		}
		if name != "INPUT" {
			s.Chains = append(s.Chains, c)
		}
	}
	return rules.Generation{rules.IPv4.Table(rules.Filter): s}
}

// said formats changes as lines: "CHAIN known +rule -2 reordered".
func said(changes []*change) []string {
	var lines []string
	for _, c := range changes {
		line := c.name
		if !c.known {
			line += " new"
		}
		for _, i := range c.appeared {
			_, spec, _ := strings.Cut(c.list.words(i), "-A "+c.name+" ")
			line += " +" + spec
		}
		if c.gone > 0 {
			line += fmt.Sprintf(" -%d", c.gone)
		}
		if c.reordered {
			line += " reordered"
		}
		lines = append(lines, line)
	}
	return lines
}

func baseOf(g rules.Generation) *Base { return newBase(&reload.Baseline{Generation: g}) }

func TestSinceABaseline(t *testing.T) {
	base := []string{"INPUT: -j A", "A: -p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -j DROP; -s 10.0.0.0/8 -j B", "B: -j RETURN", "EMPTY: "}
	with := func(chain, text string) []string {
		list := append([]string{}, base...)
		for i, line := range list {
			if strings.HasPrefix(line, chain+":") {
				list[i] = chain + ": " + text
				return list
			}
		}
		return append(list, chain+": "+text)
	}
	for _, tt := range []struct {
		name string
		now  []string
		want []string
	}{
		{"the same", base, nil},
		{"a rule at the end", with("B", "-j RETURN; -j ACCEPT"), []string{"B +-j ACCEPT"}},
		{"a rule at the top", with("A", "-j ACCEPT; -p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -j DROP; -s 10.0.0.0/8 -j B"), []string{"A +-j ACCEPT"}},
		{"a rule instead of another", with("B", "-j ACCEPT"), []string{"B +-j ACCEPT -1"}},
		{"spelled in another way", with("A", "-p 6 --destination-port 1 -j ACCEPT; -j DROP; -j DROP; -s 10.1.2.3/255.0.0.0 -j B"), nil},
		{"spelled in another way, and one more", with("A", "-p 6 --dport 1 -j ACCEPT; -j DROP; -j DROP; -j ACCEPT; -s 10.0.0.0/8 -j B"), []string{"A +-j ACCEPT"}},
		{"once more of the same", with("A", "-p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -j DROP; -j DROP; -s 10.0.0.0/8 -j B"), []string{"A +-j DROP"}},
		{"once less of the same", with("A", "-p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -s 10.0.0.0/8 -j B"), []string{"A -1"}},
		{"another order", with("A", "-s 10.0.0.0/8 -j B; -p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -j DROP"), []string{"A reordered"}},
		{"another order, and one more", with("A", "-s 10.0.0.0/8 -j B; -j ACCEPT; -p tcp -m tcp --dport 1 -j ACCEPT; -j DROP; -j DROP"), []string{"A +-j ACCEPT reordered"}},
		{"a new chain", with("C", "-j ACCEPT; -j DROP"), []string{"C new +-j ACCEPT +-j DROP"}},
		{"a new chain without a rule", with("C", ""), nil},
		{"a chain that had no rule", with("EMPTY", "-j ACCEPT"), []string{"EMPTY +-j ACCEPT"}},
		{"chains are gone", base[:1], []string{"A -4", "B -1"}},
		{"a chain is empty", with("B", ""), []string{"B -1"}},
		{"another jump", with("INPUT", "-j A; -j B"), []string{"INPUT +-j B"}},
		{"no jump", base[1:], []string{"INPUT -1"}},
		{"nothing at all", nil, []string{"A -4", "B -1", "INPUT -1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, g := baseOf(chainsOf(t, base...)), &Content{Generation: chainsOf(t, tt.now...)}
			for _, when := range []string{"first", "again, from what is known"} {
				if d := cmp.Diff(tt.want, said(b.since(g))); d != "" {
					t.Errorf("%s (-want +got):\n%s", when, d)
				}
			}
			// The earlier difference must have no effect.
			if got := said(b.since(&Content{Generation: chainsOf(t, base...)})); got != nil {
				t.Errorf("once it is as it was: %q", got)
			}
			if d := cmp.Diff(tt.want, said(b.since(g))); d != "" {
				t.Errorf("once more (-want +got):\n%s", d)
			}
		})
	}
}

// TestLacks: Lacks must list the rules that a baseline does not have, after any earlier
// comparison.
func TestLacks(t *testing.T) {
	b := baseOf(chainsOf(t, "A: -j ACCEPT; -j DROP", "B: -j RETURN"))
	g := chainsOf(t, "A: -j ACCEPT; -j LOG; -j DROP", "C: -j ACCEPT")
	for range 2 {
		for chain, want := range map[string][]string{"A": {"-j LOG"}, "C": {"-j ACCEPT"}, "D": nil} {
			c, _ := g[rules.IPv4.Table(rules.Filter)].Chain(chain)
			var got []string
			for _, r := range b.Lacks(rules.IPv4.Table(rules.Filter), chain, c.Rules) {
				got = append(got, r.Spec)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s (-want +got):\n%s", chain, d)
			}
			if n := len(b.Lacks(rules.IPv6.Table(rules.Filter), chain, c.Rules)); n != len(c.Rules) {
				t.Errorf("%s of a family that the baseline does not have: %d of %d are lacking", chain, n, len(c.Rules))
			}
		}
		b.since(&Content{Generation: g})
	}
	part, _ := g[rules.IPv4.Table(rules.Filter)].Chain("A")
	if got := b.Lacks(rules.IPv4.Table(rules.Filter), "A", part.Rules[2:]); got != nil {
		t.Errorf("a part of a chain: %v", got)
	}
}

// services returns a generation of the size of n services, with changes in the first ones.
func services(n, changed int) rules.Generation {
	var s rules.Section
	for i := range n {
		for _, kind := range []string{"SVC", "SEP", "EXT"} {
			c := rules.Chain{Name: fmt.Sprintf("KUBE-%s-%012d", kind, i)}
			for j := range 4 {
				port := 1000 + j
				if i < changed {
					port++
				}
				c.Rules = append(c.Rules, rules.Rule{Target: "ACCEPT", Spec: fmt.Sprintf(
					`-d 10.%d.%d.%d/32 -p tcp -m comment --comment "default/service-%d:http cluster IP" -m tcp --dport %d -j ACCEPT`, i>>16&255, i>>8&255, i&255, i, port)})
			}
			s.Chains = append(s.Chains, c)
		}
	}
	return rules.Generation{rules.IPv4.Table(rules.Nat): s}
}

// BenchmarkBaseline measures a baseline at 5,000 services (60,000 rules in 15,000 chains).
func BenchmarkBaseline(b *testing.B) {
	first, other := services(5000, 0), services(5000, 0)
	base := baseOf(first)
	b.Run("confirm", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			baseOf(first)
		}
	})
	b.Run("nothing changed", func(b *testing.B) {
		for b.Loop() {
			base.since(&Content{Generation: first})
		}
	})
	b.Run("a service changed", func(b *testing.B) {
		section := first[rules.IPv4.Table(rules.Nat)]
		one := services(1, 1)[rules.IPv4.Table(rules.Nat)].Chains
		changed := append(append([]rules.Chain{}, one...), section.Chains[3:]...)
		next := rules.Generation{rules.IPv4.Table(rules.Nat): {Chains: changed}}
		base.since(&Content{Generation: first})
		for b.Loop() {
			if n := len(base.since(&Content{Generation: next})); n != 3 {
				b.Fatal(n)
			}
			base.since(&Content{Generation: first})
		}
	})
	b.Run("another memory", func(b *testing.B) {
		for b.Loop() {
			base.since(&Content{Generation: first})
			base.since(&Content{Generation: other})
		}
	})
	b.Run("everything changed", func(b *testing.B) {
		next := services(5000, 5000)
		for b.Loop() {
			base.since(&Content{Generation: first})
			base.since(&Content{Generation: next})
		}
	})
}
