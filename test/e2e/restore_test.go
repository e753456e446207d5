package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRestoreRemovesNothingUnasked: an older generation may remove newer rules
// only with --yes, through the daemon and without one. A record must have the
// removed rules, and the newer generation must restore them. The newer one's
// preview marks rules that are newer than the baseline.
func TestRestoreRemovesNothingUnasked(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		d := n.Start()
		stored := func(not string) string {
			n.Helper()
			id := ""
			n.Until("another generation on disk", func() error {
				if id = n.Status().Generation.ID; id == not || !slices.Contains(n.Stored(), id) {
					return fmt.Errorf("it is %s, on disk are %q", id, n.Stored())
				}
				return nil
			})
			return id
		}
		old := stored("")
		n.Want(0, "baseline", "--confirm")
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, scenario.NewService))
		now, after := stored(old), n.Protected()

		asks := func(who string) {
			n.Helper()
			stdout, stderr := n.Want(2, "restore", "--generation="+old)
			if !strings.Contains(stdout, "WOULD REMOVE") || !strings.Contains(stderr, "nothing was written: it would remove") {
				n.Errorf("%s: restore says %q, %q", who, stdout, stderr)
			}
			if stdout, _ := n.Want(0, "restore", "--dry-run", "--generation="+old); !strings.Contains(stdout, "\n-:KUBE-SVC-") {
				n.Errorf("%s: a dry run shows no chain:\n%s", who, stdout)
			}
			n.Same(who+": protected rules that were not to be touched", after, n.Protected())
			n.Want(0, "restore", "--yes", "--generation="+old)
			n.Same(who+": protected rules of the older generation", before, n.Protected())
			if stdout, _ := n.Want(0, "restore", "--dry-run", "--generation="+now); !strings.Contains(stdout, "NOT IN THE BASELINE") || !strings.Contains(stdout, "\nnot in the baseline: +") {
				n.Errorf("%s: the preview shows:\n%s", who, stdout)
			}
			n.Want(0, "restore", "--generation="+now)
			n.Same(who+": protected rules of the newer generation", after, n.Protected())
		}
		asks("daemon")
		if f := n.Status().Flushes; len(f) != 1 || f[0].Kind != "removed" || f[0].Outcome != "requested" {
			n.Errorf("the records are %+v", f)
		}
		if stdout, _ := n.Want(0, "status", "--flush=1"); !strings.Contains(stdout, "\n-:KUBE-SVC-") {
			n.Errorf("the record has no chain:\n%s", stdout)
		}
		for id, want := range map[string]bool{old: false, now: true} {
			if text, _ := n.Want(0, "render", "--ip-family=ipv4", "--generation="+id); strings.Contains(text, "latecome") != want && strings.Contains(text, strings.Fields(scenario.NewService)[1]) != want {
				n.Errorf("render of %s:\n%s", id, text)
			}
		}
		n.Want(1, "baseline")
		d.Stop()
		n.Want(2, "baseline")
		asks("no daemon")
		d = n.Start()
		removed := 0
		for _, f := range n.WholeStatus().Flushes {
			if f.Kind == "removed" {
				removed++
			}
		}
		if removed != 2 {
			n.Errorf("%d records of what was removed, want one with and one without a daemon", removed)
		}
		d.Stop()
	})
}
