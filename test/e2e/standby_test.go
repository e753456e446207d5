package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
)

const bothStandbys = "table ip canaryd-standby, table ip6 canaryd-standby"

// wantStandbys waits until the kernel has these tables of the standby, and no others.
func wantStandbys(n *nodetest.Node, want string) {
	n.Helper()
	n.Until(fmt.Sprintf("the tables %q", want), func() error {
		var found []string
		for line := range strings.Lines(nstest.Command(n.T, "nft", "list", "tables")) {
			if strings.Contains(line, standby.TableName) {
				found = append(found, strings.TrimSpace(line))
			}
		}
		slices.Sort(found)
		if got := strings.Join(found, ", "); got != want {
			return errors.New("there is " + got)
		}
		return nil
	})
}

// gateOf returns the number of open gates in a family's table: their sets have an
// element.
func gateOf(n *nodetest.Node, family string) (elements int) {
	n.Helper()
	for line := range strings.Lines(nstest.Command(n.T, "nft", "list", "table", family, standby.TableName)) {
		elements += strings.Count(line, "elements = { ipv")
	}
	return elements
}

// wantStandbyState waits until status and metrics say this of both families.
func wantStandbyState(n *nodetest.Node, state string) {
	n.Helper()
	n.Until("the standby to be "+state, func() error {
		for _, f := range rules.Families() {
			if now := n.Status().Standby[f]; now.State != state {
				return fmt.Errorf("%s: %+v", f, now)
			}
			if value := n.Metrics()[fmt.Sprintf("standby{family=%q,state=%q}", f, state)]; value != 1 {
				return fmt.Errorf("%s: canaryd_standby of state %s is %v", f, state, value)
			}
		}
		return nil
	})
}

// TestStandbyComesAndGoes: the standby lives as long as canaryd's process,
// however that ends. No flusher can delete it, but cleanup does. It is open from
// the flush until the proof, here during the 4 s of --settle.
func TestStandbyComesAndGoes(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--standby=on", "--settle=4s")
		wantStandbys(n, bothStandbys)
		wantStandbyState(n, "armed")
		if _, stdout, _ := n.Canaryd("status"); !strings.Contains(stdout, "\nstandby ipv4 armed, ipv6 armed\n") {
			n.Errorf("status says:\n%s", stdout)
		}
		flushed := func() {
			n.Helper()
			nstest.Command(n.T, "nft", "flush", "ruleset")
			// The status precedes the heal, which is one step.
			n.Until("the gates to be open", func() error {
				for _, family := range []string{"ip", "ip6"} {
					if gateOf(n, family) < 2 {
						return fmt.Errorf("%d are open of %s", gateOf(n, family), family)
					}
				}
				return nil
			})
		}
		flushed()
		record := n.Healed(1)
		wantStandbys(n, bothStandbys)
		wantStandbyState(n, "armed")
		if stdout, _ := n.Want(0, "status", "--flush="+record.ID); !strings.Contains(stdout, "translated by the standby (ipv4, ipv6) after ") {
			n.Errorf("the record says nothing of the standby:\n%s", stdout)
		}
		if gateOf(n, "ip")+gateOf(n, "ip6") > 0 {
			n.Error("gates are open after the proof")
		}
		flushed()
		d.Kill()
		wantStandbys(n, "")
		d = n.Start("--standby=on")
		wantStandbyState(n, "armed")
		wantStandbys(n, bothStandbys)
		d.Stop()
		wantStandbys(n, "")
		d = n.Start("--standby=on")
		wantStandbyState(n, "armed")
		n.Want(0, "cleanup")
		wantStandbys(n, "")
		wantStandbyState(n, "off")
		d.Stop()
	})
}

// TestStandbyWaitsForMemory: the control group has no room for the copy. Instead
// of being killed by the kernel, canaryd makes none, and the status has the
// reason. Once there is room canaryd makes it.
func TestStandbyWaitsForMemory(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		n.Must(n.Programs.Restore(n.Context(), rules.IPv4, n.Services(1000)))
		nstest.Command(n.T, "nft", "add", "table", "ip", standby.TableName) // until there is no room
		group, file := n.MemoryGroup()
		n.Under = []string{"sh", "-c", `echo $$ >"$0/cgroup.procs" && exec "$@"`, group}
		d := n.Start("--standby=on")
		wantReason := func(reason string) {
			n.Helper()
			n.Until("the status to say "+reason, func() error {
				if now := n.Status().Standby[rules.IPv4]; now.State != "unavailable" || !strings.Contains(now.Reason, reason) {
					return fmt.Errorf("it says %+v", now)
				}
				return nil
			})
		}
		limit := func(bytes int64) { n.Must(os.WriteFile(filepath.Join(group, file), fmt.Append(nil, bytes), 0o600)) }
		wantReason("another process")
		limit(n.MemoryUsed(group) + 10<<20) // less than the 15 MiB that it needs
		nstest.Command(n.T, "nft", "delete", "table", "ip", standby.TableName)
		wantReason("no memory for the standby")
		wantStandbys(n, "")
		limit(4 << 30)
		wantStandbys(n, "table ip canaryd-standby")
		n.Until("the standby to be armed", func() error {
			if now := n.Status().Standby[rules.IPv4]; now.State != "armed" {
				return fmt.Errorf("it is %+v", now)
			}
			return nil
		})
		n.Flush()
		n.Healed(1)
		d.Stop()
	})
}
