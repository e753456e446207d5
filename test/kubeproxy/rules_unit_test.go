package kubeproxy

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

const listed = `table ip kube-proxy {
	comment "rules for kube-proxy"

	set cluster-ips {
		type ipv4_addr
		elements = { 10.96.0.11, 10.96.0.10,
			     10.96.0.12 }
	}

	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.11 . tcp . 80 comment "a/b:c, d" : goto service-B, 10.96.0.10 . tcp . 80 : goto service-A }
	}

	chain service-A {
		ip daddr 10.96.0.10 tcp dport 80 jump mark-for-masquerade
		numgen random mod 2 vmap { 1 : goto endpoint-2, 0 : goto endpoint-1 }
	}

	chain endpoint-1 {
	}
}
`

func TestParseNFTables(t *testing.T) {
	got := content{}
	parseNFTables("ip", listed, got)
	want := content{
		"ip":                  {`comment "rules for kube-proxy"`},
		"ip set cluster-ips":  {"type ipv4_addr", "10.96.0.10", "10.96.0.11", "10.96.0.12"},
		"ip map service-ips":  {"type ipv4_addr . inet_proto . inet_service : verdict", "10.96.0.10 . tcp . 80 : goto service-A", "10.96.0.11 . tcp . 80 : goto service-B"},
		"ip chain service-A":  {"ip daddr 10.96.0.10 tcp dport 80 jump mark-for-masquerade", "numgen random mod 2 vmap { 0 : goto endpoint-1, 1 : goto endpoint-2 }"},
		"ip chain endpoint-1": nil,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("content (-want +got):\n%s", diff)
	}
}

// TestCompare: compare finds each kind of error, and ignores differences without a meaning.
func TestCompare(t *testing.T) {
	const nat = `*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A PREROUTING -i eth7 -j ACCEPT
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -j KUBE-OTHER
-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.11/32 -j KUBE-SVC-A
-A KUBE-SERVICES -j KUBE-NODEPORTS
-A KUBE-SVC-A -j KUBE-SEP-A
-A KUBE-SVC-A -j KUBE-SEP-B
COMMIT
`
	const a, b = "-A KUBE-SERVICES -d 10.96.0.10/32 -j KUBE-SVC-A\n", "-A KUBE-SERVICES -d 10.96.0.11/32 -j KUBE-SVC-A\n"
	const last = "-A KUBE-SERVICES -j KUBE-NODEPORTS\n"
	for name, c := range map[string]struct {
		edit []string // pairs for strings.NewReplacer
		want difference
	}{
		"the same":                         {},
		"services in another order":        {edit: []string{a + b, b + a}},
		"rules and marks of others":        {edit: []string{":KUBE-PROXY-CANARY - [0:0]\n", "", "-A PREROUTING -i eth7 -j ACCEPT\n", ""}},
		"a missing rule":                   {edit: []string{a, ""}, want: difference{missing: 1}},
		"jumps in another order":           {edit: []string{"SERVICES\n-A PREROUTING -j KUBE-OTHER\n", "OTHER\n-A PREROUTING -j KUBE-SERVICES\n"}, want: difference{moved: 1}},
		"a missing jump":                   {edit: []string{"-A PREROUTING -j KUBE-SERVICES\n", ""}, want: difference{missing: 1}},
		"a missing chain":                  {edit: []string{":KUBE-SVC-A - [0:0]\n", "", "-A KUBE-SVC-A -j KUBE-SEP-A\n-A KUBE-SVC-A -j KUBE-SEP-B\n", ""}, want: difference{missing: 3}},
		"a stale chain":                    {edit: []string{":KUBE-PROXY-CANARY", ":KUBE-SEP-C - [0:0]\n:KUBE-PROXY-CANARY"}, want: difference{stale: 1}},
		"a stale rule":                     {edit: []string{last, "-A KUBE-SERVICES -d 10.96.0.99/32 -j KUBE-SVC-A\n" + last}, want: difference{stale: 1}},
		"a doubled rule":                   {edit: []string{a, a + a}, want: difference{doubled: 1}},
		"a doubled jump":                   {edit: []string{"-A PREROUTING -j KUBE-SERVICES\n", "-A PREROUTING -j KUBE-SERVICES\n-A PREROUTING -j KUBE-SERVICES\n"}, want: difference{doubled: 1}},
		"endpoints in another order":       {edit: []string{"-j KUBE-SEP-A\n-A KUBE-SVC-A -j KUBE-SEP-B\n", "-j KUBE-SEP-B\n-A KUBE-SVC-A -j KUBE-SEP-A\n"}, want: difference{misplaced: 1}},
		"the node ports before a service":  {edit: []string{b + last, last + b}, want: difference{misplaced: 1}},
		"a rule that stands where it must": {edit: []string{"KUBE-SEP-B\n", "KUBE-SEP-C\n"}, want: difference{missing: 1, stale: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			got := compare(saved(t, nat), saved(t, strings.NewReplacer(c.edit...).Replace(nat)))
			got.lines = nil
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(difference{})); diff != "" {
				t.Errorf("what is wrong (-want +got):\n%s", diff)
			}
		})
	}
}

// saved returns the content of nat in a save.
func saved(t *testing.T, text string) content {
	t.Helper()
	set := savefile.Tables(t, text)
	got := content{}
	for _, chain := range set[rules.Nat].Chains {
		if lines, ours := chainOf(rules.Nat, chain); ours {
			got[chain.Name] = lines
		}
	}
	return got
}
