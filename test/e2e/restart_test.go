package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestRestart: what a daemon leaves, and what the next one makes of it.
func TestRestart(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected, foreign := n.Protected(), n.Foreign()

		first := n.Start()
		id := n.Status().Generation.ID
		n.Same("protected rules next to canaryd", protected, n.Protected())
		n.Same("foreign rules next to canaryd", foreign, n.Foreign())
		marks := n.Marks()
		if got := len(marks); got < 6*2+4 {
			n.Errorf("%d marks, want a canary with its rule in 6 tables, and witnesses:\n%s", got, strings.Join(marks, "\n"))
		}
		start := time.Now()
		first.Stop()
		n.Logf("ended %s after SIGTERM", time.Since(start).Round(time.Millisecond))
		n.Same("protected rules after SIGTERM", protected, n.Protected())
		n.Same("foreign rules after SIGTERM", foreign, n.Foreign())
		n.Same("marks after SIGTERM", marks, n.Marks())

		second := n.Start()
		second.WantLog("Took up the stored generation", id)
		if s := n.Status(); s.Generation.ID != id || len(s.Flushes) != 0 {
			n.Errorf("after a restart: generation %s with %d flush records, want %s and none", s.Generation.ID, len(s.Flushes), id)
		}
		n.Same("marks after a restart", marks, n.Marks())
		second.Stop()

		n.Flush()
		third := n.Start()
		record := n.Healed(1)
		if record.Outcome != "proved" && record.Outcome != "raced" || record.Kind != "emptied" || record.Lost.Rules == 0 || record.Culprit.PID != 0 {
			n.Errorf("the record of a flush while canaryd was down: %+v", record)
		}
		n.Same("protected rules after a flush while canaryd was down", protected, n.Protected())
		third.Stop()

		n.Flush()
		awaitsDecision(n, protected, id)
		stdout, _ := n.Want(0, "restore", "--generation="+id)
		if !strings.Contains(stdout, id) {
			n.Errorf("canaryd restore printed %q, want the generation's ID in it", stdout)
		}
		n.Same("protected rules after canaryd restore", protected, n.Protected())
		n.Want(0, "check")

		last := n.Start()
		last.WantLog("Took up the stored generation", id)
		if s := n.Status(); len(s.Flushes) != 0 {
			n.Errorf("after canaryd restore and a start: %d flush records, want none", len(s.Flushes))
		}
		last.Stop()
	})
}
