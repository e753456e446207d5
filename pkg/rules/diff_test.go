package rules_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/rules"
)

// wanted is a section with every kind of content.
func wanted() rules.Section {
	return rules.Section{
		Chains: []rules.Chain{
			{Name: "KUBE-SERVICES", Rules: []rules.Rule{
				r(`-d 10.96.0.1/32 -p tcp -m comment --comment "default/a cluster IP" -m tcp --dport 443 -j KUBE-SVC-A`),
				r(`-d 10.96.0.2/32 -p tcp -m comment --comment "default/b cluster IP" -m tcp --dport 80 -j KUBE-SVC-B`),
				r("-m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"),
			}},
			{Name: "KUBE-SVC-A", Rules: []rules.Rule{r("-m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-1"), r("-j KUBE-SEP-2")}},
			{Name: "KUBE-MARK-MASQ", Rules: []rules.Rule{r("-j MARK --set-xmark 0x4000/0x4000")}},
			{Name: "KUBE-NODEPORTS"},
		},
		Jumps: []rules.Jump{
			{Chain: "PREROUTING", Rule: r("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Top}},
			{Chain: "PREROUTING", Rule: r("-m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT"), Anchor: rules.Anchor{Position: rules.Behind, Neighbour: r("-i lo -j ACCEPT")}},
			{Chain: "OUTPUT", Rule: r("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Bottom}},
		},
	}
}

func TestDiff(t *testing.T) {
	services := func(s *rules.Section) *[]rules.Rule { return &s.Chains[0].Rules }
	cases := []struct {
		name   string
		change func(*rules.Section)
	}{
		{"nothing changed", func(*rules.Section) {}},
		{"only spelled differently", func(s *rules.Section) {
			s.Chains[2].Rules = []rules.Rule{r("-j MARK --or-mark 0x4000")}
			(*services(s))[0] = r(`-m comment --comment "default/a cluster IP" -m tcp -p tcp -d 10.96.0.1 --dport https -j KUBE-SVC-A`)
			s.Jumps[1].Rule = r("-j CNI-HOSTPORT-DNAT -m addrtype --dst-type local")
			s.Jumps[0].Anchor.Position = rules.Bottom
			slices.Reverse(s.Chains)
		}},
		{"everything flushed", func(s *rules.Section) {
			s.Jumps = nil
			for i := range s.Chains {
				s.Chains[i].Rules = nil
			}
		}},
		{"everything deleted", func(s *rules.Section) { *s = rules.Section{} }},
		{"a chain deleted, an empty one too", func(s *rules.Section) { s.Chains = append(s.Chains[:1], s.Chains[2]) }},
		{"an unwanted chain", func(s *rules.Section) {
			s.Chains = append(s.Chains, rules.Chain{Name: "KUBE-SVC-C", Rules: []rules.Rule{r("-j DROP")}}, rules.Chain{Name: "KUBE-SVC-D"})
		}},
		{"a rule missing", func(s *rules.Section) { *services(s) = slices.Delete(*services(s), 1, 2) }},
		{"a rule changed", func(s *rules.Section) { s.Chains[2].Rules[0] = r("-j MARK --set-xmark 0x8000/0x8000") }},
		{"a rule added", func(s *rules.Section) { *services(s) = slices.Insert(*services(s), 1, r("-s 10.0.0.1/32 -j RETURN")) }},
		{"the last rule first", func(s *rules.Section) {
			list := services(s)
			*list = []rules.Rule{(*list)[2], (*list)[0], (*list)[1]}
		}},
		{"a chain turned round", func(s *rules.Section) { slices.Reverse(*services(s)) }},
		{"a rule doubled at the end", func(s *rules.Section) { *services(s) = append(*services(s), (*services(s))[0]) }},
		{"a rule doubled at the beginning, in other words", func(s *rules.Section) {
			*services(s) = slices.Insert(*services(s), 0, r("-m addrtype --dst-type local -j KUBE-NODEPORTS"))
		}},
		{"a rule three times", func(s *rules.Section) { s.Chains[2].Rules = slices.Repeat(s.Chains[2].Rules, 3) }},
		{"jumps missing", func(s *rules.Section) { s.Jumps = s.Jumps[:1] }},
		{"jumps in the wrong order", func(s *rules.Section) { s.Jumps[0], s.Jumps[1] = s.Jumps[1], s.Jumps[0] }},
		{"a jump doubled", func(s *rules.Section) { s.Jumps = append(s.Jumps, s.Jumps[2]) }},
		{"a jump elsewhere", func(s *rules.Section) { s.Jumps[2].Chain = "POSTROUTING" }},
		{"all at once", func(s *rules.Section) {
			s.Chains[1].Rules = nil
			slices.Reverse(*services(s))
			*services(s) = append(*services(s), r("-j DROP"))
			s.Chains = append(s.Chains[:2], rules.Chain{Name: "STRANGE"})
			s.Jumps = append(s.Jumps[1:], s.Jumps[2])
		}},
	}
	var b strings.Builder
	for _, c := range cases {
		got := wanted()
		c.change(&got)
		d := rules.Diff(wanted(), got)
		fmt.Fprintf(&b, "== %s\n", c.name)
		for _, line := range d.Lines() {
			b.WriteString(line + "\n")
		}
		if d.String() != strings.Join(d.Lines(), "\n") {
			t.Errorf("%s: String and Lines differ", c.name)
		}
	}
	golden.Compare(t, "diff.golden", []byte(b.String()))
}

// TestDiffMissesNothing: after random changes of a chain, Diff is empty exactly if the chain is
// unchanged. Its missing, unwanted and doubled rules must turn one version into the other.
func TestDiffMissesNothing(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	draw := func() []rules.Rule {
		var list []rules.Rule
		for range random.IntN(7) {
			list = append(list, r(fmt.Sprintf("-m mark --mark %#x -j X", random.IntN(4))))
		}
		return list
	}
	for range 3000 {
		one, two := draw(), draw()
		d := rules.Diff(rules.Section{Chains: []rules.Chain{{Name: "A", Rules: one}}}, rules.Section{Chains: []rules.Chain{{Name: "A", Rules: two}}})
		if same := rules.EqualRules(one, two); same != (len(d) == 0) {
			t.Fatalf("%v and %v: equal is %v, and the difference is\n%s", one, two, same, d)
		}
		n := len(one)
		for _, v := range d {
			switch v.Kind {
			case rules.ChainEmptied:
				n -= len(v.Rules)
			case rules.RuleMissing:
				n--
			case rules.RuleUnwanted:
				n++
			case rules.RuleDoubled:
				n += v.Found - v.Wanted
			}
		}
		if n != len(two) {
			t.Fatalf("%v and %v: %d rules are accounted for, not %d:\n%s", one, two, n, len(two), d)
		}
	}
}
