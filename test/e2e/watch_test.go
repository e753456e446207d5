package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// countExecs puts a script before each program of iptables, which notes its
// execution. It returns a function that counts the executions. The tests' own
// programs are found before these scripts.
func countExecs(n *nodetest.Node) (env string, count func() int) {
	n.Helper()
	n.Must(os.Mkdir("/run/counted", 0o755))
	for _, base := range []string{"iptables-", "ip6tables-"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			name := base + string(n.Programs.With) + suffix
			real, err := exec.LookPath(name)
			n.Must(err)
			script := fmt.Sprintf("#!/bin/sh\necho \"$0 $*\" >> /run/execs\nexec %s \"$@\"\n", real)
			n.Must(os.WriteFile(filepath.Join("/run/counted", name), []byte(script), 0o755))
		}
	}
	n.Must(os.WriteFile("/run/execs", nil, 0o600))
	return "PATH=/run/counted:" + os.Getenv("PATH"), func() int {
		text, err := os.ReadFile("/run/execs")
		n.Must(err)
		return bytes.Count(text, []byte("\n"))
	}
}

// TestLegacyCulprit: if the kernel names the processes that open the lock, a
// flush by iptables-legacy has its culprit. No other process is ever named. On a
// busy machine the flusher may end before canaryd can read it, and the record
// says unknown. So the test flushes until two flushes have culprits.
func TestLegacyCulprit(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		n.Load()
		d := n.Start()
		flushes, named := 0, 0
		n.Until("two flushes with their culprits", func() error {
			flush := exec.CommandContext(n.Context(), "iptables-legacy", "-w", "5", "-t", "nat", "-F")
			n.Must(flush.Run())
			flushes++
			n.Healed(flushes)
			n.Polled(2) // for a second it could be an earlier holder
			got := int(n.Status().Flushes[0].Culprit.PID)
			switch got {
			case flush.Process.Pid:
				named++
			case 0:
				n.Logf("the culprit of flush %d is unknown", flushes)
			default:
				n.Fatalf("the culprit of flush %d is process %d, and it was %d", flushes, got, flush.Process.Pid)
			}
			if named < 2 {
				return fmt.Errorf("%d of %d flushes", named, flushes)
			}
			return nil
		})
		d.Stop()
	})
}

// TestFlushesInNumbers checks the cost of flushes, and whether the numbers agree.
// TestScenarios restores everything ten times in a row.
func TestFlushesInNumbers(t *testing.T) {
	const flushes, execsEach = 3, 20
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		env, execs := countExecs(n)
		n.Env = []string{env}
		d := n.Start()
		before := n.Metrics()
		at(n, "execs at the start", execs(), 20)

		start := execs()
		for i := range flushes {
			n.Flush()
			// A flush of six commands may have several records, because the node
			// is healthy in between.
			n.Until(fmt.Sprintf("the %d. repair", i+1), func() error {
				if s := n.Looked(); len(s.Flushes) <= i || !s.Healthy || !slices.Equal(protected, n.Protected()) {
					return fmt.Errorf("%d flush records, healthy %t, or rules are missing", len(s.Flushes), s.Healthy)
				}
				return nodetest.Ready()
			})
		}
		n.Same("protected rules after the flushes", protected, n.Protected())
		at(n, "execs of the flushes", execs()-start, flushes*execsEach)

		after, status := n.Metrics(), n.Status()
		records, tables := 0.0, 0.0
		for _, r := range status.Flushes {
			if r.Lost.Rules > 0 { // records of marks alone are kept, but not counted
				records++
				tables += float64(max(len(r.Families), len(r.Tables)))
			}
		}
		for name, want := range map[string]float64{
			"flush_events_total{": records, "rules_absent_seconds{": records, "loss_since_timestamp_seconds{": 0,
			"canary_present{": 6, "exec_probe_mode{": 0, "jumps_missing{": 0, "restore_failures_total{": 0,
			"last_flush_timestamp_seconds{": float64(status.Flushes[0].Time.UnixMicro()) / 1e6,
		} {
			if got := nodetest.Sum(after, name); got < want-0.001 || got > want+0.001 {
				n.Errorf("%s...} is %f, want %f", name, got, want)
			}
		}
		if got := nodetest.Sum(after, "flushes_total{"); got < tables || got > records*6 {
			n.Errorf("flushes_total is %f in all, want %f at least, for %f records", got, tables, records)
		}
		if done := nodetest.Sum(after, "replays_total{", `"proved"`) + nodetest.Sum(after, "replays_total{", `"raced"`); done < flushes {
			n.Errorf("replays_total is %f for proved and raced, want %d at least", done, flushes)
		}
		source := map[iptables.Backend]string{iptables.NFT: `"nft"`, iptables.Legacy: `"lock"`}[n.Programs.With]
		if woken := nodetest.Sum(after, "hints_total{", source) - nodetest.Sum(before, "hints_total{", source); woken < flushes {
			n.Errorf("%f hints of source %s for %d flushes: canaryd polls", woken, source, flushes)
		}

		// At rest canaryd executes nothing: no look causes another.
		n.Polled(2)
		rest, hints := execs(), nodetest.Sum(n.Metrics(), "hints_total{", source)
		n.Polled(3)
		if at(n, "execs at rest", execs()-rest, 0); nodetest.Sum(n.Metrics(), "hints_total{", source) > hints+1 {
			n.Errorf("hints of source %s go on coming at rest", source)
		}

		if n.Programs.With == iptables.Legacy {
			flushed := time.Now()
			n.FlushUnlocked() // nothing wakes canaryd
			r := n.Healed(len(status.Flushes) + 1)
			if noticed := r.Time.Sub(flushed); noticed > 3*time.Second {
				n.Errorf("a flush without the lock was noticed after %s, want the next poll", noticed)
			}
			n.Until("the protected rules", func() error {
				if !slices.Equal(protected, n.Protected()) {
					return errors.New("they are not back")
				}
				return nil
			})
		}
		d.Stop()
	})
}

// at logs a number and fails if it is larger than most.
func at(n *nodetest.Node, what string, got, most int) {
	n.Helper()
	n.Logf("%s: %d", what, got)
	if got > most {
		n.Errorf("%s: %d, want at most %d", what, got, most)
	}
}
