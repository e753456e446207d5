//go:build wars

// These tests run the built canaryd against programs that do not stop. They flush ten times a
// second, or delete jumps as soon as they are back.
//
// Only the tag "wars" builds them (make wars). They compare processor time with a limit, which
// means nothing on a machine that runs other tests. internal/daemon tests the effects of the
// limit in virtual time.

package limits

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// length names the environment variable for the length of a war, such as 1m.
const length = "CANARYD_WAR"

const (
	everyFlush = 100 * time.Millisecond
	// burst is the cost of replays before they are limited, and share their greatest share of a
	// core after that. A minute of both is a fifth.
	burst = 2400 * time.Millisecond
	share = 0.16
	// backIn is the time from the last flush until everything is back, if a replay costs no
	// more CPU time than cheap. A costlier one delays the next.
	backIn = 2 * time.Second
	cheap  = 225 * time.Millisecond
)

// warLength returns the length of a war. In CI it is just long enough to show the limit.
func warLength(n *nodetest.Node) time.Duration {
	text := os.Getenv(length)
	if text == "" {
		return 16 * time.Second
	}
	long, err := time.ParseDuration(text)
	n.Must(err)
	return long
}

// services writes the rules of a node with 1,000 IPv4 services.
func services(n *nodetest.Node) {
	n.Helper()
	parts := scenario.Node(rules.IPv4, "v4-medium")
	for i := range parts {
		if parts[i].Name == "kube-proxy" {
			parts[i].Text = n.Services(1000)
		}
	}
	n.Must(scenario.LoadParts(n.Context(), n.Programs, rules.IPv4, parts))
	n.Must(scenario.Load(n.Context(), n.Programs, rules.IPv6))
}

// fight calls do at that interval for that time, and returns the number of calls.
func fight(n *nodetest.Node, long, every time.Duration, do func()) int {
	n.Helper()
	times := 0
	tick := time.NewTicker(every)
	defer tick.Stop()
	for range testkit.During(n.T, long, "the war") {
		do()
		times++
		<-tick.C
	}
	return times
}

// TestFlusherWithoutEnd: a process flushes nat and filter ten times a second, with 1,000
// services.
func TestFlusherWithoutEnd(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		services(n)
		d := n.Start()
		protected, foreign := n.Protected(), n.Foreign()
		generation := n.Status().Generation.Rules
		flush := func() {
			for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
				n.Must(n.Programs.Flush(n.Context(), rules.IPv4, table, ""))
			}
		}
		flush()
		left := n.Foreign()
		n.Healed(1)
		n.Same("protected rules after a single flush", protected, n.Protected())
		if len(left) >= len(foreign) {
			n.Fatal("the flusher takes nothing of others")
		}

		long := warLength(n)
		used, before := d.CPU(), n.Metrics()
		began := time.Now()
		times := fight(n, long, everyFlush, flush)
		n.Until("the contention to show", func() error {
			if n.Metrics()["contended{}"] == 1 {
				return nil
			}
			times += fight(n, time.Second, everyFlush, flush) // a busy machine flushes and heals less often
			return errors.New("it does not, after " + time.Since(began).Round(time.Second).String())
		})
		long = time.Since(began)
		last, cost := time.Now(), d.CPU()-used
		after := n.Metrics()
		back := n.Until("the rules to be back", nodetest.Ready)
		back = max(back, time.Since(last)-20*time.Millisecond)

		if after["contended{}"] != 1 {
			n.Error("canaryd_contended is not raised")
		}
		replays := nodetest.Sum(after, "replay_duration_seconds", "ipv4") - nodetest.Sum(before, "replay_duration_seconds", "ipv4")
		each := time.Duration(float64(cost) / replays)
		n.Logf("%d flushes in %s: %.0f replays, %s of CPU for each: %.1f %% of a core; back after %s", times, long.Round(time.Second), replays,
			each.Round(time.Millisecond), 100*cost.Seconds()/long.Seconds(), back.Round(time.Millisecond))
		if most := burst + each + time.Duration(share*float64(long)); cost > most {
			n.Errorf("%s of war cost %s of CPU, want at most %s", long, cost, most)
		}
		if most := backIn + max(0, each-cheap)*20/3; back > most {
			n.Errorf("the rules are back after %s, want within %s", back, most)
		}
		n.Same("protected rules after the war", protected, n.Protected())
		n.Same("foreign rules after the war", left, n.Foreign())
		if s := n.Status(); s.Generation.Rules != generation {
			n.Errorf("the generation has %d rules after the war, %d before", s.Generation.Rules, generation)
		}
		n.Until("the end of the contention", func() error {
			if got := n.Metrics()["contended{}"]; got != 0 {
				return fmt.Errorf("canaryd_contended is %v", got)
			}
			return nil
		})
		for _, line := range []string{"A process keeps undoing the replays", "Replayed rules stay in place again"} {
			if got := strings.Count(d.Log(), line); got != 1 {
				n.Errorf("the log says %d times %q, want once", got, line)
			}
		}
		d.Stop()
	})
}

// TestJumpsDeletedWithoutEnd: a process keeps deleting a jump by name. canaryd restores it
// after each grace, and reports that it is deleted again.
func TestJumpsDeletedWithoutEnd(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		const grace = 700 * time.Millisecond
		n.Load()
		d := n.Start("--jump-grace=" + grace.String())
		protected := n.Protected()
		jump := ""
		for _, r := range n.Save()[rules.IPv4][rules.Nat].Chain("POSTROUTING").Rules {
			if r.Target == "KUBE-POSTROUTING" {
				jump = r.Spec
			}
		}
		deleted := 0
		fight(n, 8*time.Second, everyFlush, func() {
			if n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-D POSTROUTING "+jump+"\nCOMMIT\n") == nil {
				deleted++
			}
		})
		last := time.Now()
		metrics := n.Metrics()
		if metrics["contended{}"] != 1 {
			n.Errorf("canaryd_contended is not raised although the jump was deleted %d times", deleted)
		}
		n.Until("the jump", func() error {
			if strings.Join(protected, "\n") != strings.Join(n.Protected(), "\n") {
				return fmt.Errorf("it is missing")
			}
			return nil
		})
		back := time.Since(last)
		n.Logf("the jump was deleted %d times; back after %s", deleted, back.Round(time.Millisecond))
		if deleted < 4 || deleted > 11 {
			n.Errorf("the jump was repaired %d times in 8 s, with a grace of %s", deleted-1, grace)
		}
		if back > grace+backIn {
			n.Errorf("the jump is back after %s, with a grace of %s", back, grace)
		}
		d.Stop()
	})
}
