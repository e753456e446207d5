package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestCleanupRemovesWhatItMade: on nft, cleanup deletes the tables that canaryd
// made on an empty node, with and without a daemon. It leaves a table that
// another process uses.
func TestCleanupRemovesWhatItMade(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		tables := func() []string {
			n.Helper()
			out, err := exec.CommandContext(n.Context(), "nft", "list", "tables").Output()
			n.Must(err)
			return slices.DeleteFunc(strings.Split(strings.TrimSpace(string(out)), "\n"), func(s string) bool { return s == "" || strings.HasSuffix(s, "canaryd-keeper") })
		}
		for _, daemon := range []bool{true, false} {
			d := n.Launch()
			n.Until("six tables that canaryd makes, on disk", func() error {
				state, _ := os.ReadFile("/run/state/state.json")
				if got := tables(); len(got) != 6 || !strings.Contains(string(state), "madeTables") {
					return fmt.Errorf("there are %q, and the state is %s", got, state)
				}
				return nil
			})
			if !daemon {
				d.Stop()
				n.Must(exec.CommandContext(n.Context(), "nft", "add", "set", "ip", "mangle", "mine", "{ type mark; }").Run())
			}
			n.Want(0, "cleanup")
			if got := tables(); daemon && len(got) > 0 || !daemon && !slices.Equal(got, []string{"table ip mangle"}) {
				n.Errorf("daemon %t: cleanup left %q", daemon, got)
			}
			if daemon {
				d.Stop()
			}
		}
	})
}
