package reload

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestGrown: Grown adds new chains, rules and jumps, and removes nothing, even if other rules
// changed.
func TestGrown(t *testing.T) {
	const (
		chainC, ruleC, inC = ":KUBE-SVC-C", "-A KUBE-SERVICES -d 10.96.0.3/32 -j KUBE-SVC-C", "-A KUBE-SVC-C -j RETURN"
		toMasq             = "-A OUTPUT -j KUBE-MARK-MASQ"
	)
	with := func(lines ...string) []string { return append(slices.Clone(whole), lines...) }
	for _, test := range []struct {
		name string
		seen []string
		want []string
	}{
		{"the same", whole, whole},
		{"a chain, and a rule at the end", with(chainC, ruleC, inC), with(chainC, ruleC, inC)},
		{
			"a rule in between",
			[]string{services, masq, svcA, svcB, chainC, toServices, ruleA, ruleC, ruleB, inA, inB, inMasq, inC},
			[]string{services, masq, svcA, svcB, chainC, toServices, ruleA, ruleC, ruleB, inA, inB, inMasq, inC},
		},
		{"a jump", with(toMasq), with(toMasq)},
		{"a jump that stands twice", with(toServices), whole},
		{"a chain is empty", []string{services, masq, svcA, svcB, toServices, ruleA, ruleB, inA, inMasq}, whole},
		{"a chain is gone, with what led to it", noB, whole},
		{"a jump is gone", []string{services, masq, svcA, svcB, ruleA, ruleB, inA, inB, inMasq}, whole},
		{"nothing is left", nil, whole},
		{"a rule went and another came: the chain stays as it was", []string{services, masq, svcA, svcB, chainC, toServices, ruleA, ruleC, inA, inB, inMasq, inC}, with(chainC, inC)},
		{"two rules changed places", []string{services, masq, svcA, svcB, toServices, ruleB, ruleA, inA, inB, inMasq}, whole},
	} {
		t.Run(test.name, func(t *testing.T) {
			old := sectionOf(t, rules.Nat, whole...)
			got, want := Grown(old, sectionOf(t, rules.Nat, test.seen...)), sectionOf(t, rules.Nat, test.want...)
			if diff := cmp.Diff(rulesOf(want), rulesOf(got)); diff != "" {
				t.Errorf("grown (-want +got):\n%s", diff)
			}
			if same := got.Equal(old); same != slices.Equal(test.want, whole) {
				t.Errorf("it is as before: %t", same)
			}
		})
	}
}

// rulesOf returns the rules of a section by chain, and its jumps by built-in chain.
func rulesOf(s rules.Section) map[string][]rules.Rule {
	all := map[string][]rules.Rule{}
	for _, c := range s.Chains {
		all[c.Name] = c.Rules
	}
	for _, h := range s.Jumps {
		all["jumps of "+h.Chain] = append(all["jumps of "+h.Chain], h.Rule)
	}
	return all
}

// TestCut: Cut takes away what the owners of chains removed, and nothing else. It leaves a chain to
// which another rule still leads.
func TestCut(t *testing.T) {
	noJump := []string{services, masq, svcA, svcB, ruleA, ruleB, inA, inB, inMasq}
	for _, test := range []struct {
		name    string
		seen    []string
		removed []string // places from which owners removed rules
		want    []string
	}{
		{"the same", whole, []string{"KUBE-SERVICES", "KUBE-SVC-B"}, whole},
		{"a service", noB, []string{"KUBE-SERVICES", "KUBE-SVC-B"}, noB},
		{"a service, by another process", noB, nil, whole},
		{"a service's chain, and another process its rule", noB, []string{"KUBE-SVC-B"}, whole},
		{
			"a service's rule, and another process its chain", noB, []string{"KUBE-SERVICES"},
			[]string{services, masq, svcA, svcB, toServices, ruleA, inA, inB, inMasq},
		},
		{
			"a rule for another", []string{services, masq, svcA, svcB, toServices, ruleB, inA, inB, inMasq}, []string{"KUBE-SERVICES"},
			[]string{services, masq, svcA, svcB, toServices, ruleB, inA, inB, inMasq},
		},
		{"a jump", noJump, []string{"PREROUTING to KUBE-SERVICES"}, noJump},
		{"a jump, by another process", noJump, []string{"KUBE-SERVICES"}, whole},
		{"everything, by another process", nil, nil, whole},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := Cut(sectionOf(t, rules.Nat, whole...), sectionOf(t, rules.Nat, test.seen...), func(chain, target string) bool {
				if target != "" {
					chain += " to " + target
				}
				return slices.Contains(test.removed, chain)
			})
			if diff := cmp.Diff(rulesOf(sectionOf(t, rules.Nat, test.want...)), rulesOf(got)); diff != "" {
				t.Errorf("cut (-want +got):\n%s", diff)
			}
		})
	}
}
