package interleavings

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

// TestInterleavingsOnTheKernel: owners and a flusher write at random moments next to the built
// canaryd. In the end all rules are their owner's newest, and no removed pod is back.
func TestInterleavingsOnTheKernel(t *testing.T) {
	t.Parallel()
	lanes := 1
	if lengthOfSoak(t) > 0 {
		lanes = 2 // the lanes mostly wait
	}
	for _, p := range kernelPaths() {
		for lane := range lanes {
			t.Run(fmt.Sprintf("%s-%d", p, lane+1), func(t *testing.T) {
				nodetest.On(t, p.backend(), func(n *nodetest.Node) {
					s := newStage(n)
					d := n.Start("--poll-interval=250ms", "--replay="+string(p.replay()))
					s.episodes(testkit.Size(1, 2), func(seed uint64) {
						if s.count.episodes%2 == 0 {
							s.renewed(seed)
						}
						s.play(seed)
					}, atRest)
					m := n.Metrics()
					n.Logf("%d flush records; replays: %.0f proved, %.0f raced, %.0f skipped, %.0f partial, %.0f failed", len(n.Status().Flushes),
						nodetest.Sum(m, "replays_total", `"proved"`), nodetest.Sum(m, "replays_total", `"raced"`), nodetest.Sum(m, "replays_total", `"skipped"`),
						nodetest.Sum(m, "replays_total", `"partial"`), nodetest.Sum(m, "replays_total", `"failed"`))
					if len(n.Status().Flushes) == 0 {
						n.Error("nothing was flushed")
					}
					d.Stop()
				})
			})
		}
	}
}

// renewed changes the pods while nothing else happens, and waits until canaryd has learned
// that.
func (s *stage) renewed(seed uint64) {
	s.Helper()
	s.renew(rand.New(rand.NewPCG(seed, 9)))
	s.Until("canaryd to learn which pods there are", func() error {
		// A canaryd at rest may not have looked yet, and a pod in place of another does not
		// change the number of rules.
		text, err := os.ReadFile("/run/state/generations/" + s.Published().Generation.ID + ".json")
		if err != nil {
			return err
		}
		for n := range s.pods[0].counter + 1 {
			want := 0
			for _, c := range s.pods {
				if slices.Contains(c.pods, n) {
					want++
				}
			}
			if got := bytes.Count(text, fmt.Appendf(nil, `dnat name: pod%d\"`, n)); got != want {
				return fmt.Errorf("it knows pod %d in %d families, and it is in %d", n, got, want)
			}
		}
		return atRest()
	})
}

// atRest returns nil if the built canaryd reports no loss and no outstanding change.
func atRest() error {
	if err := nodetest.Ready(); err != nil {
		return err
	}
	text, err := nodetest.Fetch("/api/v1/status")
	if err != nil {
		return err
	}
	var s scenario.Status
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	if !s.LearningPendingSince.IsZero() {
		return errLags
	}
	return nil
}
