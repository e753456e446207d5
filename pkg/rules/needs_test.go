package rules_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

func ruleOf(t testing.TB, spec string) rules.Rule {
	t.Helper()
	r, err := rules.ParseRule(spec)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestWhatARuleDependsOn(t *testing.T) {
	for spec, want := range map[string]rules.Needs{
		"-j ACCEPT": {},
		"-m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT":                                         {Sets: []string{"KUBE-CLUSTER-IP"}},
		"-m set ! --match-set KUBE-LOOP-BACK dst,dst,src -m set --match-set b src -j X":                {Sets: []string{"KUBE-LOOP-BACK", "b"}},
		"-j SET --add-set seen src --exist --timeout 60":                                               {Sets: []string{"seen"}},
		"-j SET --del-set seen src":                                                                    {Sets: []string{"seen"}},
		`-m set --match-set "a b" src`:                                                                 {Sets: []string{"a b"}},
		"-m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP": {Accounts: []string{"ct_state_invalid_dropped_pkts"}},
		`-m comment --comment "--match-set a src" -j ACCEPT`:                                           {},
		`-m comment --comment --match-set -m set --match-set b src`:                                    {Sets: []string{"b"}},
		"-j LOG --log-prefix --nfacct-name":                                                            {},
		"-m tcp --tcp-option 5 -j MARK --set-mark 1":                                                   {},
		"-m set --match-set a -h src":                                                                  {}, // opaque, and its reason names the option
		"-m set --match-set":                                                                           {},
		`-m recent --set --name x --mask 255.255.255.255 --rsource -m set --match-set c src`:           {Sets: []string{"c"}},
	} {
		if d := cmp.Diff(want, ruleOf(t, spec).Needs(), cmpopts.EquateEmpty()); d != "" {
			t.Errorf("%s (-want +got):\n%s", spec, d)
		}
	}
}

func TestARuleWithoutItsCounterMatchesTheSame(t *testing.T) {
	for spec, want := range map[string]string{
		"-m conntrack --ctstate INVALID -m nfacct --nfacct-name x -j DROP": "-m conntrack --ctstate INVALID -j DROP",
		"-m nfacct --nfacct-name x -m nfacct --nfacct-name y -j DROP":      "-m nfacct --nfacct-name y -j DROP",
		`-m comment --comment "a b" -m nfacct --nfacct-name x`:             `-m comment --comment "a b"`,
		"-m nfacct --nfacct-name other -j DROP":                            "-m nfacct --nfacct-name other -j DROP",
	} {
		got := ruleOf(t, spec).WithoutAccount("x")
		if got.Spec != want || got.Target != ruleOf(t, spec).Target {
			t.Errorf("%s becomes %+v, want %s", spec, got, want)
		}
	}
}

func TestARuleThatGoesElsewhereMatchesTheSame(t *testing.T) {
	for spec, want := range map[string]string{
		"-j KUBE-A":                "-j T",
		"-s 10.0.0.1/32 -g KUBE-A": "-s 10.0.0.1/32 -g T",
		"-j KUBE-A -p tcp":         "-j T -p tcp",
		`-m comment --comment "-j KUBE-A" -j KUBE-A`: `-m comment --comment "-j KUBE-A" -j T`,
		`-m comment --comment -j -j KUBE-A`:          `-m comment --comment "-j" -j T`,
	} {
		got := ruleOf(t, spec).WithTarget("T")
		if !got.Equal(ruleOf(t, want)) || got.Target != "T" {
			t.Errorf("%s becomes %+v, want %s", spec, got, want)
		}
	}
}

func TestNeedsOfASection(t *testing.T) {
	s := extract(t, rules.Filter, ":INPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n-A INPUT -j KUBE-A\n"+
		"-A KUBE-A -m set --match-set one src -j DROP\n-A KUBE-B -m set --match-set two src -j DROP\n")
	if d := cmp.Diff(rules.Needs{Sets: []string{"one", "two"}}, s.Needs(), cmpopts.EquateEmpty()); d != "" {
		t.Errorf("needs (-want +got):\n%s", d)
	}
}
