package nodetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Learned waits until canaryd has looked at all tables again, has learned the owners' writes
// until then, and is healthy. A native table is then intact, and not only changed. While
// learning is pending, Learned requests no further look. On legacy each look reads all tables,
// and a canaryd that reads all the time has no share of the processor left for other work.
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

// learned returns why learning is not complete in a status.
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

// Prepare prepares a scenario. It waits until the lost tables have other marks than any file
// that was saved meanwhile. canaryd takes a file with its present marks for its owner's word.
func (n *Node) Prepare(s scenario.Scenario) {
	n.Helper()
	if s.Prepare == nil {
		return
	}
	saves := &notedSaves{Flusher: n.Programs, sets: map[rules.Family]rules.Ruleset{}}
	n.Must(s.Prepare(n.Context(), saves))
	n.Until("other marks than those of a file that was saved before", func() error {
		now := n.Save()
		for id := range s.Lost {
			saved := rules.Ruleset{id.Name: saves.sets[id.Family][id.Name]}
			stands := rules.Ruleset{id.Name: now[id.Family][id.Name]}
			if saved[id.Name] != nil && slices.Equal(marks(id.Family, saved), marks(id.Family, stands)) {
				return fmt.Errorf("table %s has the same", id)
			}
		}
		return nil
	})
}

// notedSaves is a Flusher that notes the tables of each saved file.
type notedSaves struct {
	scenario.Flusher
	sets map[rules.Family]rules.Ruleset
}

func (s *notedSaves) Save(ctx context.Context, family rules.Family) (string, error) {
	text, err := s.Flusher.Save(ctx, family)
	if err == nil {
		s.sets[family], err = savefile.Parse(text)
	}
	return text, err
}

// Renewed is Learned with time for canaryd to renew its marks, which it does when the owners
// have been quiet for 200 ms. No status shows that. A test that continues too soon meets the
// renewal later.
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

// Stays fails the test with the error of still. It calls still repeatedly until canaryd has
// looked that many more times because its --poll-interval was over.
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

// Polled waits until the daemon has looked that many more times because its --poll-interval was
// over.
func (n *Node) Polled(times int) {
	n.Helper()
	n.Stays(times, "that it polls", func() error { return nil })
}

// polls returns how many times the daemon has looked because its --poll-interval was over.
func (n *Node) polls() float64 {
	n.Helper()
	return n.Metrics()[`hints_total{source="poll"}`]
}
