package api

import (
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLostText: the text counts every kind of thing that a flush can remove.
func TestLostText(t *testing.T) {
	for want, lost := range map[string]Lost{
		"no rule":                          {},
		"1 rule":                           {Rules: 1},
		"102 elements":                     {Elements: 102},
		"189 rules, 141 chains, 1 element": {Rules: 189, Chains: 141, Elements: 1},
		"62 rules, 1 chain, 2 jumps":       {Rules: 62, Chains: 1, Jumps: 2},
		"2000 rules, 1 chain, 221 elements, 1 jump": {Rules: 2000, Chains: 1, Elements: 221, Jumps: 1},
		"1 chain": {Chains: 1},
	} {
		if d := cmp.Diff(want, lost.Text(strconv.Itoa)); d != "" {
			t.Errorf("%+v (-want +got):\n%s", lost, d)
		}
	}
}

// TestGuarded: faces count native tables and iptables' tables, and show the larger count first.
func TestGuarded(t *testing.T) {
	families := func(v canary.Verdict) map[rules.Family]Verdicts {
		return map[rules.Family]Verdicts{rules.IPv4: {rules.Mangle: v, rules.Nat: canary.Intact, rules.Filter: canary.Changed}}
	}
	proxy := NativeTable{Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 141, Rules: 189, Elements: 221}
	for name, test := range map[string]struct {
		status      Status
		want        string
		first, only bool
	}{
		"iptables' tables": {Status{Families: families(canary.Intact), Generation: Generation{Rules: 62, Chains: 16}}, "62 rules in 16 chains", false, false},
		"no rule":          {Status{Families: families(canary.Intact)}, "0 rules in 0 chains", false, false},
		"an immune table":  {Status{Families: families(canary.Intact), Native: []NativeTable{{Table: "inet firewalld", Immune: true}}}, "0 rules in 0 chains", false, false},
		"native tables": {Status{Families: families(canary.Intact), Native: []NativeTable{proxy, proxy}},
			"378 rules, 282 chains and 442 elements of native tables", true, true},
		"native tables of a lost mangle": {Status{Families: families(canary.TableDeleted), Native: []NativeTable{proxy}},
			"189 rules, 141 chains and 221 elements of native tables", true, false},
		"native tables before a first look": {Status{Native: []NativeTable{proxy}}, "189 rules, 141 chains and 221 elements of native tables", true, false},
		"kubelet's rules too": {Status{Families: families(canary.Intact), Generation: Generation{Rules: 3, Chains: 2}, Native: []NativeTable{proxy}},
			"3 rules in 2 chains, and 189 rules, 141 chains and 221 elements of native tables", true, false},
		"few native rules": {Status{Families: families(canary.Intact), Generation: Generation{Rules: 62, Chains: 16}, Native: []NativeTable{{Chains: 1, Rules: 1}}},
			"62 rules in 16 chains, and 1 rule and 1 chain of native tables", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := test.status
			if d := cmp.Diff(test.want, s.GuardedText(strconv.Itoa)); d != "" {
				t.Errorf("what is guarded (-want +got):\n%s", d)
			}
			if s.NativeFirst() != test.first || s.OnlyNative() != test.only {
				t.Errorf("native tables are first: %v, and alone: %v; want %v and %v", s.NativeFirst(), s.OnlyNative(), test.first, test.only)
			}
		})
	}
}
