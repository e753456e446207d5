package e2e

import (
	"os"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestDeclaredRulesOfRaw: raw and security are guarded on demand. Declared rules
// are a demand even while the tables are empty. Their status must also be "in
// force and proved".
func TestDeclaredRulesOfRaw(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(os.MkdirAll("/run/rules.d", 0o755))
		const raw = "*raw\n:CORP-RAW - [0:0]\n-A PREROUTING -j CORP-RAW\n-A CORP-RAW -p udp -m udp --dport 4789 -j ACCEPT\nCOMMIT\n"
		const security = "*security\n:CORP-SEC - [0:0]\n-A INPUT -j CORP-SEC\n-A CORP-SEC -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n"
		n.Must(os.WriteFile("/run/rules.d/corp.v4", []byte(raw+security), 0o600))
		wantDeclared := func(when string) {
			n.Helper()
			all := strings.Join(n.Foreign(), "\n")
			for _, want := range []string{"-j CORP-RAW", "--dport 4789 -j ACCEPT", "-j CORP-SEC", "--dport 22 -j ACCEPT"} {
				if !strings.Contains(all, want) {
					n.Errorf("%s %q is not in force:\n%s", when, want, all)
				}
			}
			if flushes := n.Status().Flushes; len(flushes) > 0 {
				n.Errorf("%s there are %d flushes", when, len(flushes))
			}
		}
		first := n.Start("--rules-dir=/run/rules.d")
		wantDeclared("at the start")
		first.Stop()
		n.Start("--rules-dir=/run/rules.d")
		wantDeclared("after a restart")
	})
}
