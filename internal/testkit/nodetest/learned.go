package nodetest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

// Learned waits until canaryd has looked at all tables again, has learned what their owners wrote
// until then, and is healthy. A native table is intact then, and not only changed. While something
// is pending it does not ask for another look: on legacy each look reads all tables, and a canaryd
// that reads all the time has no share of the processor left to ask what else moved.
func (n *Node) Learned() {
	n.Helper()
	s := n.Looked()
	n.Until("canaryd to learn what the owners wrote", func() error {
		err := learned(s)
		switch {
		case err == nil:
			return Ready()
		case s.LearningPendingSince.IsZero():
			s = n.Looked()
		default:
			s = n.Status()
		}
		return err
	})
}

// learned returns why a status does not show that all is learned.
func learned(s scenario.Status) error {
	if !s.LearningPendingSince.IsZero() || !s.Healthy {
		return fmt.Errorf("pending since %v, healthy %t", s.LearningPendingSince, s.Healthy)
	}
	for _, t := range s.Native {
		if t.Verdict != "intact" {
			return fmt.Errorf("table %s is %s", t.Table, t.Verdict)
		}
	}
	return nil
}

// Renewed is Learned with time for canaryd to renew its marks, which it does when the owners have
// been quiet for 200 ms. No status shows that. A test that goes on too soon meets the renewal
// later.
func (n *Node) Renewed() {
	n.Helper()
	n.Learned()
	testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
}

// NativeStored waits until the present content of each native table is on disk.
func (n *Node) NativeStored() {
	n.Helper()
	n.Until("the native tables to be on disk", func() error {
		s := n.Looked()
		if len(s.Native) == 0 {
			return fmt.Errorf("no native table is guarded")
		}
		stdout, _ := n.Want(0, "status")
		for _, t := range s.Native {
			if !slices.ContainsFunc(strings.Split(stdout, "\n"), func(line string) bool {
				return strings.Contains(line, t.Generation) && strings.HasSuffix(line, "; the present one")
			}) {
				return fmt.Errorf("%s of table %s is not:\n%s", t.Generation, t.Table, stdout)
			}
		}
		return nil
	})
}

// Stays fails the test with the error of still, which is called again and again until canaryd has
// looked as many times more because its --poll-interval was over.
func (n *Node) Stays(polls int, what string, still func() error) {
	n.Helper()
	before := n.polls()
	shown := fmt.Sprintf("%d looks, in which is to be seen %s", polls, what)
	testkit.Steadily(n.T, shown, n.whileItRuns(shown, func() error {
		seen := n.polls() - before // before the last look of the test
		if err := still(); err != nil {
			n.Fatalf("after %.0f of %d looks, in which is to be seen %s: %v", seen, polls, what, err)
		}
		if seen < float64(polls) {
			return fmt.Errorf("it has looked %.0f times", seen)
		}
		return nil
	}))
}

// Polled waits until the daemon has looked as many times more because its --poll-interval was over.
func (n *Node) Polled(times int) {
	n.Helper()
	n.Stays(times, "that it polls", func() error { return nil })
}

// polls returns how often the daemon has looked because its --poll-interval was over.
func (n *Node) polls() float64 {
	n.Helper()
	return n.Metrics()[`hints_total{source="poll"}`]
}
