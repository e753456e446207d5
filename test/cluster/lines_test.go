package cluster

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// kubeProxyAnyOrder are the chains that kube-proxy fills from a map of Go. Each full sync
// writes their rules in another order, except for nat's last rule.
var kubeProxyAnyOrder = []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"}

// linesOf returns the lines of a chain's rules, with their places if those matter.
func linesOf(where string, chain rules.Chain) []string {
	var lines []string
	inOrder := !slices.Contains(kubeProxyAnyOrder, chain.Name)
	for i, r := range slices.DeleteFunc(slices.Clone(chain.Rules), canary.IsMark) {
		switch {
		case inOrder:
			lines = append(lines, fmt.Sprintf("%s %04d %s", where, i, r.Spec))
		case i == len(chain.Rules)-1 && r.Target == "KUBE-NODEPORTS":
			lines = append(lines, where+" last "+r.Spec)
		default:
			lines = append(lines, where+" "+r.Spec)
		}
	}
	return lines
}

// TestLinesOf: rules in another order are other lines, unless their order does not matter.
// canaryd's marks are no lines.
func TestLinesOf(t *testing.T) {
	const head = "*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n"
	lines := func(text string) (all []string) {
		set := savefile.Tables(t, head+text+"COMMIT\n")
		for _, chain := range set[rules.Nat].Chains {
			all = append(all, linesOf(chain.Name, chain)...)
		}
		slices.Sort(all)
		return all
	}
	for _, c := range []struct {
		name, before, after string
		same                bool
	}{
		{"the same", "-A PREROUTING -j KUBE-SERVICES\n", "-A PREROUTING -j KUBE-SERVICES\n", true},
		{"a jump below another rule", "-A PREROUTING -j KUBE-SERVICES\n-A PREROUTING -j ACCEPT\n", "-A PREROUTING -j ACCEPT\n-A PREROUTING -j KUBE-SERVICES\n", false},
		{"services in another order", "-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n-A KUBE-SERVICES -d 10.0.0.2/32 -j ACCEPT\n",
			"-A KUBE-SERVICES -d 10.0.0.2/32 -j ACCEPT\n-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n", true},
		{"a service below the node ports", "-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n-A KUBE-SERVICES -j KUBE-NODEPORTS\n",
			"-A KUBE-SERVICES -j KUBE-NODEPORTS\n-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n", false},
		{"doubled", "-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n", "-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n-A KUBE-SERVICES -d 10.0.0.1/32 -j ACCEPT\n", false},
	} {
		if diff := cmp.Diff(lines(c.before), lines(c.after)); (diff == "") != c.same {
			t.Errorf("%s: same %t, want %t (-before +after):\n%s", c.name, diff == "", c.same, diff)
		}
	}
}
