package e2e

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestRestart: what a daemon leaves, and what the next one makes of it.
func TestRestart(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load()
		protected, foreign := n.protected(), n.foreign()

		first := n.start()
		id := n.status().Generation.ID
		n.same("protected rules beside canaryd", protected, n.protected())
		n.same("foreign rules beside canaryd", foreign, n.foreign())
		marks := n.marks()
		if got := len(marks); got < 6*2+4 {
			n.Errorf("%d marks, want a canary with its rule in 6 tables, and witnesses:\n%s", got, strings.Join(marks, "\n"))
		}
		start := time.Now()
		first.stop()
		n.Logf("ended %s after SIGTERM", time.Since(start).Round(time.Millisecond))
		n.same("protected rules after SIGTERM", protected, n.protected())
		n.same("foreign rules after SIGTERM", foreign, n.foreign())
		n.same("marks after SIGTERM", marks, n.marks())

		second := n.start()
		second.wantLog("Took up the stored generation", id)
		if s := n.status(); s.Generation.ID != id || len(s.Flushes) != 0 {
			n.Errorf("after a restart: generation %s with %d flush records, want %s and none", s.Generation.ID, len(s.Flushes), id)
		}
		n.same("marks after a restart", marks, n.marks())
		second.stop()

		n.flush()
		third := n.start()
		record := n.healed(1)
		if record.Outcome != "proved" && record.Outcome != "raced" || record.Kind != "emptied" || record.Lost.Rules == 0 || record.Culprit.PID != 0 {
			n.Errorf("the record of a flush while canaryd was down: %+v", record)
		}
		n.same("protected rules after a flush while canaryd was down", protected, n.protected())
		third.stop()

		n.flush()
		old := n.start("--max-stored-age=1ms")
		told := regexp.MustCompile(`too old .*canaryd restore --generation.* generation="([0-9a-f]{12})"`).FindStringSubmatch(old.log())
		if told == nil {
			n.Fatalf("the log does not say what to do about a generation that is too old:\n%s", old.log())
		}
		id = told[1]
		time.Sleep(2 * time.Second) // two polls
		if slices.Equal(protected, n.protected()) {
			n.Error("a generation older than --max-stored-age was replayed unasked")
		}
		old.stop()

		if !slices.Contains(n.stored(), id) {
			n.Fatalf("generation %s is not among the stored ones: %q", id, n.stored())
		}
		stdout, _ := n.want(0, "restore", "--generation="+id)
		if !strings.Contains(stdout, id) {
			n.Errorf("canaryd restore printed %q, want the generation's ID in it", stdout)
		}
		n.same("protected rules after canaryd restore", protected, n.protected())
		n.want(0, "check")

		last := n.start()
		last.wantLog("Took up the stored generation", id)
		if s := n.status(); len(s.Flushes) != 0 {
			n.Errorf("after canaryd restore and a start: %d flush records, want none", len(s.Flushes))
		}
		last.stop()
	})
}
