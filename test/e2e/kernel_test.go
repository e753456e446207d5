package e2e

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// withoutIPv6 is the environment variable that makes this test binary execute
// its arguments on a kernel without IPv6.
const withoutIPv6 = "CANARYD_E2E_WITHOUT_IPV6"

func executeWithoutIPv6() error {
	if err := nstest.Without(nstest.LackIPv6()); err != nil {
		return err
	}
	return syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
}

// TestWithoutIPv6: canaryd reports a family that the kernel lacks once and leaves
// it out. It guards the other family.
func TestWithoutIPv6(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		self, err := os.Executable()
		n.Must(err)
		n.Env, n.Under = []string{withoutIPv6 + "=1"}, []string{self}
		d := n.Start("--backend=auto")
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Healed(1)
		d.WantLog("A family is not watched", "ipv6", "the kernel has no IPv6")
		if got := strings.Count(d.Log(), "IPv6"); got != 1 {
			n.Errorf("the missing family is reported %d times, want once", got)
		}
		table, _ := n.Want(0, "status")
		if !strings.Contains(table, "ipv6 is not watched") {
			n.Errorf("status does not say that IPv6 is not watched:\n%s", table)
		}
		d.Stop()
	})
}
