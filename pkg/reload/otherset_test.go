package reload

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// setsText is nodeText with two rules that name an ipset: one in a chain of kubelet's, and a jump.
func setsText() string {
	jump := "-A INPUT -m set --match-set bad src -j KUBE-FIREWALL\n"
	return strings.Replace(nodeText, "-A INPUT -j KUBE-FIREWALL\n", jump+"-A KUBE-FIREWALL -m set --match-set bad src -j DROP\n", 1)
}

// TestARuleThatTookAnotherIpsetIsWrittenAgain: an ipset is made again during a write, and the
// kernel takes rules with another set. The proof finds them, and the same run replaces them by the
// right rules. None of them stays misread.
func TestARuleThatTookAnotherIpsetIsWrittenAgain(t *testing.T) {
	for _, wrong := range []int{1, 2, otherSetTries, otherSetTries + 2} {
		for _, rule := range []string{"src -j DROP", "src -j KUBE-FIREWALL"} {
			t.Run(fmt.Sprintf("%d times, %s", wrong, rule), func(t *testing.T) {
				onBothWith(t, setsText(), func(t *testing.T, n *testNode) {
					reference := newMarkNode(t, n.Info().Backend, setsText())
					must(t, reference.Flush(v4, rules.Filter, ""))
					reference.heal()
					same := func() {
						if diff := cmp.Diff(reference.content(v4), n.content(v4)); diff != "" {
							t.Errorf("(-want +got):\n%s", diff)
						}
					}
					n.Sets().Put(iptables.Set{Name: "other", Create: "hash:ip"})
					left := wrong
					n.Misread("--match-set bad "+rule, "--match-set other "+rule)
					n.BeforeRestore(func() { // this restore's reading was set before
						if left--; left == 0 {
							n.Misread("", "")
						}
					})
					must(t, n.Flush(v4, rules.Filter, ""))
					result := n.heal()
					filter := result[v4].Tables[rules.Filter]
					if strings.Contains(n.content(v4), "other") {
						t.Errorf("a rule with the other set is left:\n%s", n.content(v4))
					}
					if wrong < otherSetTries {
						n.outcome(result, v4, Proved)
						same()
						return
					}
					if q := filter.Quarantined; !filter.Proved || len(q) == 0 || q[0].Misread || !q[0].Refused || q[0].Reason != errOtherSet.Error() {
						t.Fatalf("proved %t, in quarantine: %+v", filter.Proved, q)
					}
					n.BeforeRestore(nil)
					n.Misread("", "")
					n.job.Quarantine = n.job.Quarantine.With(v4.Table(rules.Filter), filter.Quarantined)
					readmitted, err := n.replayer.Readmit(t.Context(), n.job)
					must(t, err)
					n.take(readmitted)
					same()
				})
			})
		}
	}
}

// TestAMisreadRuleWithItsOwnIpsetIsWrittenOnce: a rule that names an ipset and is misread in
// another way is written once, like any other.
func TestAMisreadRuleWithItsOwnIpsetIsWrittenOnce(t *testing.T) {
	onBothWith(t, setsText(), func(t *testing.T, n *testNode) {
		n.Misread("--match-set bad src -j DROP", "--match-set bad dst -j DROP")
		must(t, n.Flush(v4, rules.Filter, ""))
		filter := n.heal()[v4].Tables[rules.Filter]
		if q := filter.Quarantined; len(q) == 0 || !q[0].Misread || q[0].Reason != errMisread.Error() {
			t.Errorf("in quarantine: %+v", q)
		}
	})
}

// onBothWith is onBoth with these rules. Some of them name the ipset bad.
func onBothWith(t *testing.T, text string, body func(t *testing.T, n *testNode)) {
	t.Helper()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { body(t, newMarkNode(t, backend, text)) })
	}
}
