package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAPodThatIsRemovedDuringTheOutageDoesNotComeBack: iptables -F leaves chains, so a missing
// chain was deleted by its owner since. The plugins' DEL finds no rule any more, but deletes its
// chain.
func TestAPodThatIsRemovedDuringTheOutageDoesNotComeBack(t *testing.T) {
	text := strings.Replace(nodeText, "-A KUBE-SVC-A ", "-A KUBE-SERVICES -p udp -j KUBE-MARK-MASQ\n-A KUBE-SVC-A ", 1)
	onBoth(t, func(t *testing.T, n *testNode) {
		n = newNode(t, n.Info().Backend, text, v4)
		must(t, n.Flush(v4, rules.Nat, ""))
		must(t, n.RestoreNoflush(v4, "*nat\n-X KUBE-SVC-A\nCOMMIT\n"))
		result := n.heal()
		n.outcome(result, v4, Proved)
		n.marked(v4)
		saved := n.SaveTable(v4, rules.Nat)
		if strings.Contains(saved, "KUBE-SVC-A") {
			t.Errorf("what the owner removed is back:\n%s", saved)
		}
		for _, line := range []string{"-A PREROUTING -j KUBE-SERVICES", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000", ":KUBE-SERVICES -"} {
			if !strings.Contains(saved, line) {
				t.Errorf("%q is not back:\n%s", line, saved)
			}
		}
		if d := cmp.Diff([]string{"KUBE-SVC-A"}, result[v4].Tables[rules.Nat].Finding.Released); d != "" {
			t.Errorf("released (-want +got):\n%s", d)
		}
		if again := n.heal(); again[v4].Outcome != Skipped {
			t.Errorf("another look finds %v", verdicts(again[v4]))
		}
	})
}

// TestChainsThatMostlyWentWereNotRemovedByTheirOwner: another process deletes chains one by one,
// and canaryd looks when most chains are gone.
func TestChainsThatMostlyWentWereNotRemovedByTheirOwner(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.Flush(v4, rules.Nat, ""))
		must(t, n.RestoreNoflush(v4, "*nat\n-X KUBE-MARK-MASQ\n-X KUBE-POSTROUTING\n-X KUBE-SERVICES\nCOMMIT\n"))
		n.outcome(n.heal(), v4, Proved)
		if saved := n.SaveTable(v4, rules.Nat); strings.Count(saved, "\n:KUBE-") != 5 || !strings.Contains(saved, "-A KUBE-SERVICES -p tcp") {
			t.Errorf("not all is back:\n%s", saved)
		}
	})
}
