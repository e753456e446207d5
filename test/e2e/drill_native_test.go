package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// ownersTables returns each table of an owner, as nft lists it.
func ownersTables(n *nodetest.Node) (kept []string) {
	n.Helper()
	for table := range strings.SplitSeq(nstest.Command(n.T, "nft", "-s", "list", "ruleset"), "\n}\n") {
		if strings.HasPrefix(table, "table ip kube-proxy ") || strings.HasPrefix(table, "table ip6 docker-bridges ") {
			kept = append(kept, table)
		}
	}
	return kept
}

// startNative starts canaryd on a node that may have native tables only.
func startNative(n *nodetest.Node, flags ...string) *nodetest.Process {
	n.Helper()
	p := n.Launch(flags...)
	n.Until("canaryd to be ready", nodetest.Ready)
	return p
}

// drillTables returns nft's list of the tables of drills; "" if there are none.
func drillTables(n *nodetest.Node) string {
	n.Helper()
	var found []string
	for line := range strings.Lines(nstest.Command(n.T, "nft", "list", "tables")) {
		if strings.Contains(line, "canaryd-drill") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return strings.Join(found, ", ")
}

// TestDrillNative: on the kernel, canaryd makes a table of its own next to guarded native tables,
// takes it, and the watcher's own hint reveals that. Nothing else changes, and nothing is left. A
// flush right after it is a flush.
func TestDrillNative(t *testing.T) {
	for _, mixed := range []bool{false, true} {
		t.Run(map[bool]string{false: "native tables only", true: "both"}[mixed], func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				nstest.NeedProgram(n.T, "nft")
				if mixed {
					n.Load()
				}
				n.LoadNative(100)
				nstest.CommandInput(n.T, "table ip6 docker-bridges {\n chain filter-forward {\n  type filter hook forward priority 0;\n  counter accept\n }\n}\n", "nft", "-f", "-")
				d := startNative(n, "--protect=kube,cni,nft:*:*")
				n.NativeStored()
				ours := []string{"ip canaryd-drill", "ip6 canaryd-drill"}
				before, protected, foreign, metrics := ownersTables(n), n.Protected(), n.Foreign(), n.Metrics()
				for _, kind := range []canary.Verdict{canary.TableDeleted, canary.Emptied, canary.Replaced} {
					reply := drill(n, "--table=native", "--kind="+string(kind))
					if reply.Result != api.DrillPassed || !slices.Equal(reply.Native, ours) || reply.Kind != kind || len(reply.Families) != 0 {
						n.Errorf("the drill, %s: %+v", kind, reply)
					}
					wantNativeSteps(n, reply.Steps)
					if left := drillTables(n); left != "" {
						n.Errorf("these tables are left after the reply: %s", left)
					}
				}
				reply := drill(n)
				if reply.Result != api.DrillPassed || !slices.Equal(reply.Native, ours) || (len(reply.Families) == 2) != mixed {
					n.Errorf("a drill of all: %+v", reply)
				}
				if wantNativeSteps(n, reply.Steps[max(len(reply.Steps)-5, 0):]); (len(reply.Steps) == 10) != mixed {
					n.Errorf("the timeline: %+v", reply.Steps)
				}
				n.Same("owners' tables after drills", before, ownersTables(n))
				n.Same("protected rules after drills", protected, n.Protected())
				n.Same("foreign rules after drills", foreign, n.Foreign())
				now := n.Metrics()
				if now["flush_events_total{}"] != metrics["flush_events_total{}"] || now[`drills_total{result="passed"}`] != 4 {
					n.Errorf("metrics after drills: %v", now)
				}
				if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, "by canaryd drill") || !strings.Contains(stdout, "ip6 canaryd-drill") {
					n.Errorf("the record:\n%s", stdout)
				}
				nstest.Command(n.T, "nft", "flush", "ruleset")
				n.Until("the tables after a flush", func() error {
					if now := ownersTables(n); !slices.Equal(slices.Sorted(slices.Values(now)), slices.Sorted(slices.Values(before))) {
						return fmt.Errorf("%d tables, want %d", len(now), len(before))
					}
					return nodetest.Ready()
				})
				if n := n.Metrics()["flush_events_total{}"]; n != 1 {
					t.Errorf("%v flushes", n)
				}
				d.Stop()
			})
		})
	}
}

// wantNativeSteps fails unless these steps are those of a drill of native tables.
func wantNativeSteps(n *nodetest.Node, steps []api.DrillStep) {
	n.Helper()
	if len(steps) != 5 || steps[0].What != "canaryd has taken away its own tables ip canaryd-drill and ip6 canaryd-drill" || steps[4].What != "proved by a read" {
		n.Errorf("the timeline: %+v", steps)
	}
	if !slices.IsSortedFunc(steps, func(a, b api.DrillStep) int { return int(1e9 * (a.Seconds - b.Seconds)) }) {
		n.Errorf("the timeline goes back: %+v", steps)
	}
}

// TestKilledNativeDrill: canaryd is killed in the middle of a drill. The next one, or a cleanup
// without one, removes the drill's table.
func TestKilledNativeDrill(t *testing.T) {
	for _, by := range []string{"the next canaryd", "a cleanup"} {
		t.Run(by, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				nstest.NeedProgram(n.T, "nft")
				n.LoadNative(100)
				guard := []string{"--protect=nft:ip:*", "--settle=10s"}
				d := startNative(n, guard...)
				n.NativeStored()
				before := ownersTables(n)
				go func() { _, _, _ = n.Canaryd("drill", "--kind=emptied") }()
				n.Until("a drill's table", func() error {
					if drillTables(n) == "" {
						return os.ErrNotExist
					}
					return nil
				})
				d.Kill()
				if drillTables(n) == "" {
					n.Fatal("the drill was over")
				}
				if by == "a cleanup" {
					n.Want(0, "cleanup")
				} else {
					d = startNative(n, guard...)
				}
				n.Until("the end of the drill's table", func() error {
					if left := drillTables(n); left != "" {
						return fmt.Errorf("%s is left", left)
					}
					return nil
				})
				n.Same("other tables", before, ownersTables(n))
				if by != "a cleanup" {
					if now := n.Metrics(); now["flush_events_total{}"] != 0 {
						n.Errorf("metrics: %v", now)
					}
					d.Stop()
				}
			})
		})
	}
}
