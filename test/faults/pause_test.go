package faults

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestPause: a pause on the kernel, from its command to its end.
func TestPause(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		d := n.Start()

		stdout, _ := n.Want(0, "pause", "--for=1h")
		if !strings.HasPrefix(stdout, "replays are paused until 20") {
			n.Errorf("pause prints %q", stdout)
		}
		n.Flush()
		lost := n.Protected()
		time.Sleep(2500 * time.Millisecond) // two polls
		n.Same("protected rules in a pause", lost, n.Protected())
		if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "paused") {
			n.Errorf("/readyz in a pause: %v", err)
		}
		metrics := n.Metrics()
		if metrics["paused{}"] != 1 || metrics["loss_since_timestamp_seconds{}"] == 0 || metrics["flush_events_total{}"] != 1 ||
			nodetest.Sum(metrics, "flushes_total") != 6 || nodetest.Sum(metrics, "replays_total") != 0 {
			n.Errorf("metrics in a pause: %v", metrics)
		}
		if stdout, _ := n.Want(1, "status"); !strings.Contains(stdout, "ipv6 filter is emptied; replays are paused until 20") || !strings.Contains(stdout, "waiting: paused") {
			n.Errorf("status in a pause:\n%s", stdout)
		}
		n.Want(1, "check")

		const short = 2 * time.Second
		begin := time.Now()
		stdout, _ = n.Want(0, "pause", "--for="+short.String())
		if !strings.Contains(stdout, "in place of") {
			n.Errorf("a second pause prints %q", stdout)
		}
		time.Sleep(1500 * time.Millisecond)
		if now := n.Protected(); time.Since(begin) < short { // to save takes seconds on a busy machine
			n.Same("protected rules shortly before the pause runs out", lost, now)
		}
		back := n.Within(nodetest.HealsIn, "the rules to be back", nodetest.Ready)
		n.Logf("ready %s after the pause ran out", (back - 500*time.Millisecond).Round(10*time.Millisecond))
		n.Same("protected rules after the pause", protected, n.Protected())
		d.WantLog("The pause has run out", "replaying what is lost")
		if s := n.Status(); len(s.Flushes) != 1 || s.Flushes[0].Outcome != "proved" && s.Flushes[0].Outcome != "raced" {
			n.Errorf("flush records after the pause: %+v", s.Flushes)
		} else if back := s.Flushes[0].Time.Add(time.Duration(s.Flushes[0].AbsentSeconds * float64(time.Second))); back.Before(begin.Add(short)) {
			n.Errorf("the rules were back at %s, and the pause had until %s", back, begin.Add(short))
		}
		if stdout, _ := n.Want(0, "resume"); stdout != "there was no pause\n" {
			n.Errorf("resume without a pause prints %q", stdout)
		}

		n.Want(0, "pause")
		n.Flush()
		time.Sleep(time.Second)
		n.Same("protected rules in the second pause", lost, n.Protected())
		d.Stop()
		n.Same("protected rules after SIGTERM in a pause", lost, n.Protected())
		next := n.Launch()
		paused := func() error {
			if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "paused") {
				return fmt.Errorf("/readyz: %v", err)
			}
			return nil
		}
		n.Within(nodetest.StartsIn, "canaryd to go on with the pause", paused)
		next.WantLog("Took up the stored generation")
		next.WantLog("the pause of the last run goes on")
		n.Same("protected rules after a restart in a pause", lost, n.Protected())
		next.Kill()
		next = n.Launch()
		n.Within(nodetest.StartsIn, "canaryd after a kill in a pause", paused)
		n.Same("protected rules after a kill in a pause", lost, n.Protected())
		n.Want(0, "resume")
		n.Within(nodetest.HealsIn, "the rules to be back", nodetest.Ready)
		n.Same("protected rules after a resume", protected, n.Protected())

		n.Want(0, "pause")
		n.Flush()
		time.Sleep(500 * time.Millisecond)
		n.Same("protected rules in the third pause", lost, n.Protected())
		if stdout, _ := n.Want(0, "resume"); stdout != "replays are no longer paused\n" {
			n.Errorf("resume prints %q", stdout)
		}
		n.Within(nodetest.HealsIn, "the rules to be back", nodetest.Ready)
		n.Same("protected rules after resume", protected, n.Protected())
		next.Stop()
	})
}
