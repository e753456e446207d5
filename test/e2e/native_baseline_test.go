package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestNativeBaseline: a rule that another process adds to kube-proxy's native table appears since
// the baseline, and elements do not. After a flush the rule is back, and the record names it as not
// confirmed. That holds over a restart, until the shown generations are confirmed.
func TestNativeBaseline(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		d := n.Start(guardNative)
		n.Want(0, "baseline", "--confirm")
		nstest.Command(t, "nft", "add", "element", "ip", "kube-proxy", "cluster-ips", "{ 10.99.0.1 }")
		nstest.Command(t, "nft", "add", "rule", "ip", "kube-proxy", "services", "ip", "saddr", "203.0.113.7", "counter", "accept")
		lists := func(when string) string {
			n.Helper()
			text := ""
			n.Until(when+", the added rule is listed", func() error {
				var code int
				code, text, _ = n.Canaryd("baseline")
				if code != 1 || !strings.Contains(text, "1 rule appeared since in 1 chain\n") || !strings.Contains(text, "\n+rule services ip saddr 203.0.113.7 counter accept\n") {
					return fmt.Errorf("exit code %d:\n%s", code, text)
				}
				return nil
			})
			return text
		}
		lists("after the write")
		want := listed(n)
		nstest.Command(t, "nft", "flush", "ruleset")
		wantNative(n, want, 1)
		if stdout, _ := n.Want(0, "status", "--flush=1"); !strings.Contains(stdout, "1 rule is not in the baseline") || !strings.Contains(stdout, ": ip kube-proxy services 1\n") {
			n.Errorf("the record says\n%s", stdout)
		}
		lists("after a replay")
		d.Stop()
		d = n.Start(guardNative)
		text := lists("after a restart")
		_, command, _ := strings.Cut(text, "to confirm these rules: canaryd baseline ")
		if stdout, _ := n.Want(0, "baseline", strings.Fields(command)...); !strings.Contains(stdout, "no rule appeared since") || !strings.Contains(stdout, "it takes the place of") {
			n.Errorf("confirmed: %s", stdout)
		}
		n.Want(0, "baseline")
		d.Stop()
	})
}
