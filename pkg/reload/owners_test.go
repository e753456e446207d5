package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestARemovedPodDoesNotHoldUpItsTable: after a flush, CNI's DEL finds and deletes only the pod's
// own chain. The chain of all pods led to it. That jump is not put back, and does not fail the
// table.
func TestARemovedPodDoesNotHoldUpItsTable(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		nat := removePod(t, n)
		want := ruleList("-p tcp -m tcp --dport 2 -j CNI-DN-2")
		if d := cmp.Diff(want, nat.Chain("CNI-HOSTPORT-DNAT").Rules); d != "" {
			t.Errorf("CNI-HOSTPORT-DNAT (-want +got):\n%s", d)
		}
		if c := nat.Chain("CNI-DN-1"); c != nil {
			t.Errorf("the chain of the pod that was removed is back: %v", c.Rules)
		}
		if rs := nat.Chain("CNI-LAST").Rules; len(rs) != 0 {
			t.Errorf("CNI-LAST, which led to nothing else, holds %v", rs)
		}
		if rs := nat.Chain("KUBE-SERVICES").Rules; len(rs) == 0 {
			t.Error("the other chains of the table are not back")
		}
	})
}

// TestADeclaredChainIsNobodysToRemove: chains that a declared source claims are put back with all
// rules that lead there, even if another process removed them during the outage.
func TestADeclaredChainIsNobodysToRemove(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.job.Claimed = func(chain string) bool { return strings.HasPrefix(chain, "CNI-") }
		nat := removePod(t, n)
		if rs := nat.Chain("CNI-HOSTPORT-DNAT").Rules; len(rs) != 2 {
			t.Errorf("CNI-HOSTPORT-DNAT holds %v", rs)
		}
		for _, name := range []string{"CNI-DN-1", "CNI-LAST", "CNI-LONELY"} {
			if c := nat.Chain(name); c == nil || len(c.Rules) != 1 {
				t.Errorf("%s is %v", name, c)
			}
		}
	})
}

// removePod flushes nat, has CNI remove a pod's chain, heals, and returns nat.
func removePod(t *testing.T, n *testNode) *rules.Table {
	t.Helper()
	const pods = `*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-1 - [0:0]
:CNI-DN-2 - [0:0]
:CNI-LAST - [0:0]
:CNI-LONELY - [0:0]
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 2 -j CNI-DN-2
-A CNI-DN-1 -p tcp -j DNAT --to-destination 10.0.0.1:80
-A CNI-DN-2 -p tcp -j DNAT --to-destination 10.0.0.2:80
-A CNI-LAST -j CNI-LONELY
-A CNI-LONELY -j RETURN
COMMIT
`
	n.replayer.Protection.Chain = func(chain string) bool { return protects(chain) || strings.HasPrefix(chain, "CNI-") }
	must(t, n.RestoreNoflush(v4, pods))
	n.learn()
	must(t, n.Flush(v4, rules.Nat, ""))
	must(t, n.RestoreNoflush(v4, "*nat\n-X CNI-DN-1\n-X CNI-LONELY\nCOMMIT\n"))
	n.outcome(n.heal(), v4, Proved)
	after, err := n.Fake.Read(t.Context(), v4)
	must(t, err)
	return after.Tables[rules.Nat]
}
