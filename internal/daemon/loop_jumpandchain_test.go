package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAJumpGoesWithItsChainsRules: one transaction deletes a jump and empties its target. The
// chain is back at once, and the jump after its owner's grace. canaryd does not learn its
// removal, and the node is not healthy until then.
func TestAJumpGoesWithItsChainsRules(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()[rules.IPv4][rules.Nat]
		var lines []string
		for _, rule := range before.Chain("OUTPUT").Rules {
			if rule.Target == "KUBE-SERVICES" {
				lines = append(lines, "-D OUTPUT "+rule.Spec)
			}
		}
		if len(lines) != 1 {
			t.Fatalf("jumps to KUBE-SERVICES in OUTPUT: %q", lines)
		}
		r.write(rules.Nat, append(lines, "-F KUBE-SERVICES")...)
		r.after(3 * time.Second)
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES"); len(got) != len(before.Chain("KUBE-SERVICES").Rules) {
			t.Errorf("KUBE-SERVICES has %d rules, want %d", len(got), len(before.Chain("KUBE-SERVICES").Rules))
		}
		r.wantNotReady("ipv4 nat is jumps_missing")
		r.after(20 * time.Second)
		r.wantReady()
		if !slices.ContainsFunc(r.chain(rules.IPv4, rules.Nat, "OUTPUT"), func(spec string) bool { return strings.HasSuffix(spec, "-j KUBE-SERVICES") }) {
			t.Errorf("OUTPUT holds %q, without the jump", r.chain(rules.IPv4, rules.Nat, "OUTPUT"))
		}
	})
}
