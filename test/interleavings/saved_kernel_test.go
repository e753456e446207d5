package interleavings

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSavedFilesThatAreFlushedOnTheKernel: a file from before one pod was added and another one
// removed is restored, and a third pod may be removed. A flush follows before the built canaryd
// has replaced the file's rules. In the end exactly the present pods have host ports.
func TestSavedFilesThatAreFlushedOnTheKernel(t *testing.T) {
	t.Parallel()
	for _, p := range kernelPaths() {
		t.Run(string(p), func(t *testing.T) {
			nodetest.On(t, p.backend(), func(n *nodetest.Node) {
				s := newStage(n)
				// canaryd waits longer for the flusher than the story needs.
				d := n.Start("--poll-interval=250ms", "--settle=1s", "--replay="+string(p.replay()))
				between := 0
				s.episodes(testkit.Size(1, 2), func(seed uint64) {
					if s.restoredAndFlushed(seed) {
						between++
					}
				}, atRest)
				n.Logf("%d times a file was flushed before canaryd had replaced it", between)
				d.Stop()
			})
		})
	}
}

// restoredAndFlushed plays one such story. It reports whether the flush was in time.
func (s *stage) restoredAndFlushed(seed uint64) bool {
	s.Helper()
	rng := rand.New(rand.NewPCG(seed, 13))
	c := s.pods[rng.IntN(len(s.pods))]
	for len(c.pods) < 3 { // an earlier story may have removed one
		c.add()
	}
	s.podsDo()
	saved, err := s.Programs.Save(s.Context(), c.family)
	s.Must(err)
	text := savedTable(saved, rules.Nat)
	s.renewed(seed)
	s.Until("the marks to be renewed", func() error {
		now, err := s.Programs.Save(s.Context(), c.family)
		if err == nil && strings.Contains(now, nonce.FindString(text)) {
			err = errors.New("the file still has those of now")
		}
		return err
	})
	before := len(s.Published().Flushes)
	s.Must(s.Programs.Restore(s.Context(), c.family, "*nat\n"+text+"COMMIT\n"))
	var seen scenario.Status
	s.Until("canaryd to see the file", func() error {
		seen = s.Published()
		if verdict := seen.Families[c.family][rules.Nat]; verdict != scenario.Replaced && len(seen.Flushes) == before {
			return fmt.Errorf("it is %s", verdict)
		}
		return nil
	})
	if rng.IntN(2) == 0 {
		c.del(rng.IntN(len(c.pods) - 1)) // the file lacks the last one
		s.podsDo()
	}
	in := seen.Families[c.family][rules.Nat] == scenario.Replaced
	s.Must(s.Programs.Flush(s.Context(), c.family, rules.Nat, ""))
	s.count.flushes += 2
	return in
}
