package canary

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestWhatAPurgeTook: a table's canary is present, and an owner and a purge delete by name. The
// owner's deletions are its decision. Single rules, whole chains, and jumps that the purge
// deleted are lost, without a grace.
func TestWhatAPurgeTook(t *testing.T) {
	mark := Mark{Nonce: NewNonce()}
	chain := func(name string, specs ...string) rules.Chain {
		c := rules.Chain{Name: name}
		for _, s := range specs {
			r, err := rules.ParseRule(s)
			if err != nil {
				t.Fatal(err)
			}
			c.Rules = append(c.Rules, r)
		}
		return c
	}
	jump := rules.Jump{Chain: "FORWARD", Rule: chain("", "-j KUBE-FORWARD").Rules[0]}
	named := rules.Jump{Chain: "FORWARD", Rule: chain("", "-s 172.17.0.0/16 -j ACCEPT").Rules[0], Named: true}
	want := Wanted{CanaryChain: DefaultChain, Mark: mark, Section: rules.Section{
		Chains: []rules.Chain{chain("KUBE-FORWARD", "-s 10.0.0.1 -j DROP", "-s 10.0.0.2 -j DROP"), chain("KUBE-XLB-A", "-j DROP"), chain("KUBE-XLB-B", "-j DROP")},
		Jumps:  []rules.Jump{jump, named},
	}}
	set := savefile.Tables(t, "*filter\n:FORWARD ACCEPT [0:0]\n:"+DefaultChain+" - [0:0]\n:KUBE-FORWARD - [0:0]\n:KUBE-XLB-A - [0:0]\n-A "+DefaultChain+" "+
		mark.Nonce.Rule().Spec+"\n-A KUBE-FORWARD -s 10.0.0.2 -j DROP\nCOMMIT\n")
	table := set[rules.Filter]
	seen := Seen{Table: table, Section: rules.Protection{Chain: func(name string) bool { return name != DefaultChain && name != "FORWARD" }}.Extract(table, IsMark)}
	taken := []rules.Jump{{Chain: "KUBE-FORWARD", Rule: chain("", "-s 10.0.0.1 -j DROP").Rules[0]}}
	all := func(string, string) bool { return true }
	for _, tt := range []struct {
		name   string
		purged func(chain, target string) bool
		want   Finding
	}{
		{"its owner", nil, Finding{Verdict: Changed, Waiting: []rules.Jump{jump}}},
		{"a purge", all, Finding{Verdict: Emptied, Jumps: []rules.Jump{jump, named}, Emptied: []string{"KUBE-XLB-A"}, Missing: []string{"KUBE-XLB-B"}, Taken: taken}},
		{"a purge of one chain", func(chain, _ string) bool { return chain == "KUBE-FORWARD" }, Finding{Verdict: Emptied, Waiting: []rules.Jump{jump}, Taken: taken}},
		{"a purge of a chain", func(chain, _ string) bool { return chain == "KUBE-XLB-B" }, Finding{Verdict: Emptied, Waiting: []rules.Jump{jump}, Missing: []string{"KUBE-XLB-B"}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := want
			w.Purged = tt.purged
			if d := cmp.Diff(tt.want, Judge(w, seen), cmp.Comparer(func(a, b rules.Rule) bool { return a.Equal(b) })); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
