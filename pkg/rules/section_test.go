package rules_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

func kube(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }

func jump(chain, spec string, p rules.Position) rules.Jump {
	return rules.Jump{Chain: chain, Rule: r(spec), Anchor: rules.Anchor{Position: p}}
}

// mixed is a section of two owners with interleaved chains and jumps.
func mixed() rules.Section {
	return rules.Section{
		Chains: []rules.Chain{
			{Name: "CNI-A", Rules: []rules.Rule{r("-j KUBE-MARK"), r("-j corp")}},
			{Name: "KUBE-SERVICES", Rules: []rules.Rule{r("-j CNI-A")}},
			{Name: "CNI-B"},
			{Name: "KUBE-MARK"},
		},
		Jumps: []rules.Jump{
			jump("PREROUTING", "-j CNI-A", rules.Top),
			jump("PREROUTING", "-j KUBE-SERVICES", rules.Top),
			jump("PREROUTING", "-j CNI-B", rules.Bottom),
			jump("OUTPUT", "-j KUBE-SERVICES", rules.Top),
			jump("OUTPUT", "-j KUBE-SERVICES", rules.Top),
		},
		DependsOn: []string{"corp", "office"},
		Policies:  map[string]string{"OUTPUT": "DROP"},
	}
}

func TestSplitPartsChainsAndJumpsAndKeepsTheirOrder(t *testing.T) {
	s := mixed()
	tests := []struct {
		name      string
		claimed   func(string) bool
		own, rest rules.Section
	}{
		{"no claims", nil, rules.Section{}, s},
		{"nothing is claimed", func(string) bool { return false }, rules.Section{DependsOn: s.DependsOn, Policies: s.Policies}, s},
		{"all is claimed", func(string) bool { return true }, s, rules.Section{DependsOn: s.DependsOn, Policies: s.Policies}},
		{"some", kube, rules.Section{
			Chains: []rules.Chain{s.Chains[1], s.Chains[3]}, Jumps: []rules.Jump{s.Jumps[1], s.Jumps[3], s.Jumps[4]},
			DependsOn: s.DependsOn, Policies: s.Policies,
		}, rules.Section{
			Chains: []rules.Chain{s.Chains[0], s.Chains[2]}, Jumps: []rules.Jump{s.Jumps[0], s.Jumps[2]},
			DependsOn: s.DependsOn, Policies: s.Policies,
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			own, rest := s.Split(test.claimed)
			if d := cmp.Diff(test.own, own, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("own (-want +got):\n%s", d)
			}
			if d := cmp.Diff(test.rest, rest, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("rest (-want +got):\n%s", d)
			}
			if d := cmp.Diff(mixed(), s); d != "" {
				t.Errorf("the section itself was changed:\n%s", d)
			}
			// Together they must have the same meaning as before: the same rules, and each
			// owner's jumps in their order.
			joined := own.Join(rest)
			if joined.RuleCount() != s.RuleCount() || len(joined.Chains) != len(s.Chains) {
				t.Errorf("%d rules in %d chains, want %d in %d", joined.RuleCount(), len(joined.Chains), s.RuleCount(), len(s.Chains))
			}
			for _, c := range s.Chains {
				if got, ok := joined.Chain(c.Name); !ok || !rules.EqualRules(got.Rules, c.Rules) {
					t.Errorf("%s holds %v", c.Name, got.Rules)
				}
			}
			if d := cmp.Diff(s.DependsOn, joined.DependsOn); d != "" {
				t.Errorf("DependsOn (-want +got):\n%s", d)
			}
			if d := cmp.Diff(s.Policies, joined.Policies); d != "" {
				t.Errorf("policies (-want +got):\n%s", d)
			}
			ownAgain, restAgain := joined.Split(test.claimed)
			if !ownAgain.Equal(own) || !restAgain.Equal(rest) {
				t.Error("splitting what was joined gives something else")
			}
		})
	}
}

func TestJoinPutsTheFirstSectionsJumpsFirst(t *testing.T) {
	first := rules.Section{Jumps: []rules.Jump{jump("OUTPUT", "-j KUBE-A", rules.Top)}, Chains: []rules.Chain{{Name: "KUBE-A"}}, DependsOn: []string{"x", "b"}}
	second := rules.Section{Jumps: []rules.Jump{jump("OUTPUT", "-j CNI-A", rules.Top)}, Chains: []rules.Chain{{Name: "CNI-A"}}, DependsOn: []string{"b", "a"}}
	accept, drop := map[string]string{"OUTPUT": "ACCEPT"}, map[string]string{"OUTPUT": "DROP"}
	for _, test := range []struct {
		name                      string
		first, second, wantPolicy map[string]string
	}{
		{"no policies", nil, nil, nil},
		{"the first's alone", accept, nil, accept},
		{"the second's alone", nil, drop, drop},
		{"the second's were read", accept, drop, drop},
	} {
		first.Policies, second.Policies = test.first, test.second
		got := first.Join(second)
		want := rules.Section{
			Chains:    []rules.Chain{{Name: "KUBE-A"}, {Name: "CNI-A"}},
			Jumps:     []rules.Jump{first.Jumps[0], second.Jumps[0]},
			DependsOn: []string{"a", "b", "x"}, Policies: test.wantPolicy,
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
		if !slices.Equal(first.DependsOn, []string{"x", "b"}) || !slices.Equal(second.DependsOn, []string{"b", "a"}) {
			t.Fatalf("%s: the joined sections were changed: %v, %v", test.name, first.DependsOn, second.DependsOn)
		}
	}
}

func TestJoinOfGenerationsHoldsEveryFamilyAndTableOfBoth(t *testing.T) {
	a := rules.Section{Chains: []rules.Chain{{Name: "KUBE-A", Rules: []rules.Rule{r("-j RETURN")}}}}
	b := rules.Section{Chains: []rules.Chain{{Name: "CNI-A", Rules: []rules.Rule{r("-j ACCEPT")}}}}
	first := rules.Generation{rules.IPv4.Table(rules.Nat): a, rules.IPv4.Table(rules.Filter): a}
	second := rules.Generation{rules.IPv4.Table(rules.Nat): b, rules.IPv4.Table(rules.Mangle): b, rules.IPv6.Table(rules.Nat): b}
	want := rules.Generation{
		rules.IPv4.Table(rules.Nat): a.Join(b), rules.IPv4.Table(rules.Filter): a, rules.IPv4.Table(rules.Mangle): b,
		rules.IPv6.Table(rules.Nat): b,
	}
	got := first.Join(second)
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got.ID() != want.ID() || len(first) != 2 || len(first[rules.IPv4.Table(rules.Nat)].Chains) != 1 {
		t.Errorf("ID %s, want %s; first is now %v", got.ID(), want.ID(), first)
	}
	for name, g := range map[string]rules.Generation{
		"nothing with it": rules.Generation(nil).Join(second), "it with nothing": second.Join(nil), "it with an empty one": second.Join(rules.Generation{}),
	} {
		if g.ID() != second.ID() {
			t.Errorf("%s: ID %s, want %s", name, g.ID(), second.ID())
		}
	}
}
