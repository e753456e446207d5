package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

// TestShort runs the program like make bench-detect, with few of everything, and checks the
// results that do not depend on the machine.
func TestShort(t *testing.T) {
	// It runs in a namespace, so that it is skipped, or fails, if there are none.
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy", "strace")
		dir := t.TempDir()
		bench := filepath.Join(dir, "detect")
		nstest.Command(t, "go", "build", "-o", bench, ".")
		testShort(t, nodetest.Canaryd(), bench)
	})
}

func testShort(t *testing.T, canaryd, bench string) {
	cmd := exec.CommandContext(t.Context(), bench, "-short", "-o", "json", "-canaryd", canaryd)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	var all []Result
	if err := json.Unmarshal(stdout.Bytes(), &all); err != nil {
		t.Fatalf("%v in %s", err, &stdout)
	}
	var rows []string
	for _, r := range all {
		rows = append(rows, string(r.Backend))
		check(t, r)
	}
	if diff := cmp.Diff([]string{"nft", "legacy"}, rows); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	printed := table(all)
	if strings.Contains(printed, "NaN") || strings.Contains(printed, "Inf") {
		t.Errorf("the table holds what is no number:\n%s", printed)
	}
	t.Log("\n" + printed)
}

// check checks one row. Its limits on times are ratios within the row, with much room, because
// this machine may be busy.
func check(t *testing.T, r Result) {
	t.Helper()
	fail := func(broken bool, what string) {
		t.Helper()
		if broken {
			t.Errorf("%s, %d rules: %s: %+v", r.Backend, r.Rules, what, r)
		}
	}
	fail(r.Rules < 200 || r.Chains < 20, "too few rules")
	// It is 300 and more on a quiet machine.
	fail(r.Looks.Ratio(r.Looks.Tick) < 20, "a look at the tick costs a twentieth of an exec probe, or more")
	fail(r.Looks.Ratio(r.Looks.Hint) < 1, "a look after a hint is dearer than the exec probe")
	verdicts := map[string]int{}
	for _, v := range r.Verdicts {
		verdicts[v.Counted] = v.Delay.N
		fail(v.WithFlush.Median <= 0 || v.Delay.Median > v.WithFlush.Median, "verdicts before the flush")
		fail(v.Delay.Max >= 30e6, "a verdict came only after half a minute")
	}
	want := map[string]int{fromCommit: 6}
	if r.Backend == "legacy" {
		want = map[string]int{fromRelease: 6, fromProgram: 2}
	}
	if diff := cmp.Diff(want, verdicts); diff != "" {
		t.Errorf("%s: number of flushes (-want +got):\n%s", r.Backend, diff)
	}
	fail(r.Idle.CPUPercent <= 0 || r.Idle.CPUPercent > 50, "idle, and at work")
	fail(r.Idle.SyscallsPerMinute <= 0 || len(r.Idle.Commonest) == 0, "no system calls")
	fail(r.Idle.ProcessesPerMinute != 0 || r.Idle.ChildFaults != 0, "processes started while nothing happened")
	fail(r.Idle.RSS <= r.Idle.Anon || r.Idle.Anon <= 0 || r.Idle.Peak < r.Idle.RSS, "memory")
}

// TestGeneration: the generation has at least the requested number of rules, and not many more.
// It is valid, and has the chains whose loss canaryd judges by name.
func TestGeneration(t *testing.T) {
	for _, want := range []int{200, 1000, 20000} {
		g, err := generation(want)
		if err != nil {
			t.Fatal(err)
		}
		if count, _ := g.Counts(); count < want || count > want+100 {
			t.Errorf("%d rules, want %d and few more", count, want)
		}
		if err := rules.Validate(g); err != nil {
			t.Error(err)
		}
		if c, ok := g[rules.IPv4.Table(rules.Nat)].Chain("KUBE-SERVICES"); !ok || len(c.Rules) < 3 {
			t.Errorf("KUBE-SERVICES holds %d rules", len(c.Rules))
		}
	}
}

func TestSpread(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(100-i)*time.Microsecond)
	}
	for name, tc := range map[string]struct {
		values []time.Duration
		want   Spread
	}{
		"nothing": {nil, Spread{}},
		"one":     {[]time.Duration{3 * time.Microsecond}, Spread{1, 3, 3, 3, 3, 3}},
		"two":     {[]time.Duration{2 * time.Microsecond, time.Microsecond}, Spread{2, 1, 1, 2, 2, 2}},
		"hundred": {hundred, Spread{100, 10, 50, 90, 99, 100}},
	} {
		if diff := cmp.Diff(tc.want, spread(tc.values)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestCPUOf: the clock of a process's CPU time moves with its work.
func TestCPUOf(t *testing.T) {
	for _, pid := range []int{0, os.Getpid()} {
		before, err := cpuOf(pid)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Until(t, "the clock of a process that works to move", func() error {
			after, err := cpuOf(pid)
			if err != nil || after <= before {
				return fmt.Errorf("pid %d: from %s to %s, %w", pid, before, after, err)
			}
			return nil
		})
	}
}

func TestParseCounts(t *testing.T) {
	const text = `syscall          calls
---------------- ---------
futex                   95
execve                   2
---------------- ---------
total                   97
`
	got, err := parseCounts([]byte(text))
	if diff := cmp.Diff(map[string]int{"futex": 95, "execve": 2}, got); diff != "" || err != nil {
		t.Errorf("counts (-want +got), %v:\n%s", err, diff)
	}
	for _, broken := range []string{"", "syscall calls\nfutex 95\n", strings.Replace(text, "97", "96", 1)} {
		if got, err := parseCounts([]byte(broken)); err == nil {
			t.Errorf("%q reads as %v", broken, got)
		}
	}
}
