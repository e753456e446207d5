package e2e

import (
	"os"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestDeclaredRulesThatCanarydCannotSpell: canaryd knows the rules by their
// bytes, which iptables-restore makes of their text once. They are proved and
// restored, and a restart is no flush.
func TestDeclaredRulesThatCanarydCannotSpell(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(os.MkdirAll("/run/rules.d", 0o755))
		const rules = "*filter\n:CORP-GUARD - [0:0]\n-A FORWARD -j CORP-GUARD\n" +
			"-A CORP-GUARD -p tcp --dport 22 -m cpu --cpu 0 -j DROP\n-A CORP-GUARD -m hashlimit --hashlimit-upto 3/sec --hashlimit-name corp -j ACCEPT\nCOMMIT\n"
		n.Must(os.WriteFile("/run/rules.d/corp.v4", []byte(rules), 0o600))
		guarded := func() int {
			return strings.Count(strings.Join(n.Foreign(), "\n"), " -j DROP") + strings.Count(strings.Join(n.Foreign(), "\n"), "hashlimit-name corp")
		}
		first := n.Start("--rules-dir=/run/rules.d")
		if got := guarded(); got != 2 {
			n.Errorf("%d of 2 rules are there", got)
		}
		first.Stop()
		observer := n.Start("--rules-dir=/run/rules.d", "--mode=observe") // it cannot write to learn bytes
		if text, _ := n.Want(0, "status"); !strings.HasPrefix(text, "healthy") {
			n.Errorf("after a restart in mode observe:\n%s", text)
		}
		observer.Stop()
		n.Start("--rules-dir=/run/rules.d")
		if flushes := n.Status().Flushes; len(flushes) > 0 {
			n.Errorf("a restart is reported as %d flushes", len(flushes))
		}
		n.Flush()
		n.Healed(1)
		if got := guarded(); got != 2 {
			n.Errorf("%d of 2 rules are back", got)
		}
	})
}
