package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
)

// drill runs a drill with the built program, and returns its JSON output.
func drill(n *nodetest.Node, flags ...string) api.DrillReply {
	n.Helper()
	stdout, _ := n.Want(0, "drill", append(flags, "-o", "json")...)
	var reply api.DrillReply
	n.Must(json.Unmarshal([]byte(stdout), &reply))
	return reply
}

// TestDrill runs drills on the kernel. The watcher's own hint must reveal each
// removed canary, which must be restored and proved. No rule and no counter of
// flushes may change. A real drill is a flush.
func TestDrill(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		protected, foreign, marks := n.Protected(), n.Foreign(), len(n.Marks())
		tables := protect.Always()
		for i, kind := range canary.DrillKinds() {
			table := tables[i%len(tables)]
			reply := drill(n, "--table="+string(table), "--kind="+string(kind))
			if reply.Result != api.DrillPassed || len(reply.Families) != 2 || reply.Kind != kind {
				n.Errorf("the drill of %s, %s: %+v", table, kind, reply)
			}
			wantSteps(n, reply)
		}
		n.Same("protected rules after drills", protected, n.Protected())
		n.Same("foreign rules after drills", foreign, n.Foreign())
		if now := n.Marks(); len(now) != marks {
			n.Errorf("%d marks after drills, %d before: %q", len(now), marks, now)
		}
		for f, set := range n.Save() {
			for name, table := range set {
				if table.Chain(canary.DrillChain) != nil {
					n.Errorf("the stand-in is left in %s %s", f, name)
				}
			}
		}
		if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, "the last drill passed ") || !strings.Contains(stdout, "canaryd drill") || !strings.Contains(stdout, "drilled") {
			n.Errorf("status after drills:\n%s", stdout)
		}
		real := drill(n, "--for-real", "--yes")
		if real.Result != api.DrillPassed || real.Jumps == 0 || !real.Alert.Fires {
			n.Errorf("the drill for real: %+v", real)
		}
		wantSteps(n, real)
		n.Same("protected rules after a drill for real", protected, n.Protected())
		n.Same("foreign rules after a drill for real", foreign, n.Foreign())
		if now := n.Metrics(); now["flush_events_total{}"] != 1 {
			n.Errorf("a drill for real is %v flushes", now["flush_events_total{}"])
		}
		d.Stop()
	})
}

// wantSteps fails unless the timeline goes forward and ends with a proof within a second or so.
func wantSteps(n *nodetest.Node, r api.DrillReply) {
	n.Helper()
	if len(r.Steps) != 5 || !strings.HasPrefix(r.Steps[0].What, "canaryd has taken away ") || r.Steps[len(r.Steps)-1].What != "proved by a read of all tables" {
		n.Errorf("the timeline: %+v", r.Steps)
	}
	if !slices.IsSortedFunc(r.Steps, func(a, b api.DrillStep) int { return int(1e9 * (a.Seconds - b.Seconds)) }) {
		n.Errorf("the timeline goes back: %+v", r.Steps)
	}
	if len(r.Log) == 0 {
		n.Errorf("no line of the log: %+v", r)
	}
}
