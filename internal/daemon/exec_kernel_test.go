package daemon

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/watch"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const lockFile = "/run/xtables.lock"

// A floor is a Daemon on the real kernel that may only execute iptables, with
// the watchers that `canaryd run` would start.
type floor struct {
	*rig
	backend iptables.Backend
	execs   func() int // since it was asked last
}

// onFloor runs body with one for each backend.
func onFloor(t *testing.T, body func(r floor)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend))
				body(startFloor(t, backend, time.Second))
			})
		})
	}
}

func startFloor(t *testing.T, backend iptables.Backend, poll time.Duration) floor {
	f := floor{rig: &rig{
		t: t, hints: watch.NewHints(), writers: &watch.Writers{},
		reg: prometheus.NewRegistry(), log: &logText{},
	}, backend: backend}
	f.iptables("-t nat -N KUBE-SERVICES", "-t nat -A KUBE-SERVICES -d 10.96.0.1/32 -j ACCEPT",
		"-t nat -A PREROUTING -j KUBE-SERVICES", "-t filter -N KUBE-FIREWALL", "-t filter -A KUBE-FIREWALL -s 10.0.0.1 -j DROP",
		"-t filter -A INPUT -j KUBE-FIREWALL")
	f.countExecs()
	k, err := iptables.Open(t.Context(), iptables.Config{Backend: backend, ExecProbe: true, LockFile: lockFile, LockWait: 100 * time.Millisecond})
	must(t, err)
	selector, err := rules.NewSelector([]string{"kube"})
	must(t, err)
	f.d = New(Config{
		Kernel: k, Hints: f.hints, Writers: f.writers,
		Metrics: NewMetrics(f.reg, MetricsOptions{Families: k.Families(), Sources: []string{"snapshot"}, Hints: f.hints.Counts}),
		Mode:    Heal, Source: "snapshot", Protects: selector.Protects, Canary: canary.DefaultChain,
		PollInterval: poll, Settle: 20 * time.Millisecond, HookGrace: 15 * time.Second, MaxStoredAge: time.Minute,
	})
	ctx, cancel := context.WithCancel(f.log.context(t.Context(), 2))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return f.d.Run(ctx) })
	if backend == iptables.NFT {
		w := &watch.CommitWatcher{Hints: f.hints, Writers: f.writers, Subscribe: func() (watch.CommitSource, error) { return k.Subscribe() }}
		group.Go(func() error { return w.Run(ctx) })
	} else {
		w := &watch.LockWatcher{Path: lockFile, Hints: f.hints, Writers: f.writers}
		group.Go(func() error { return w.Run(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		must(t, group.Wait())
		must(t, k.Close())
		if t.Failed() {
			t.Logf("canaryd's log:\n%s", f.log)
		}
	})
	f.until("ready", func() error { return f.d.Status().Ready() })
	return f
}

// iptables executes lines of IPv4, each in a process of its own.
func (f floor) iptables(lines ...string) {
	f.t.Helper()
	for _, line := range lines {
		nstest.Command(f.t, "iptables-"+string(f.backend), append([]string{"-w", "5"}, strings.Fields(line)...)...)
	}
}

// countExecs lets the daemon find scripts that note each exec; the tests' own
// programs go uncounted.
func (f *floor) countExecs() {
	f.t.Helper()
	const notes = "/run/execs"
	dir, before := f.t.TempDir(), os.Getenv("PATH")
	for _, base := range []string{"iptables-", "ip6tables-"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			name := base + string(f.backend) + suffix
			real, err := exec.LookPath(name)
			must(f.t, err)
			script := fmt.Sprintf("#!/bin/sh\n[ -z \"$UNCOUNTED\" ] && echo \"$0 $*\" >> %s\nexec %s \"$@\"\n", notes, real)
			must(f.t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
		}
	}
	must(f.t, os.WriteFile(notes, nil, 0o600))
	f.t.Setenv("PATH", dir+":"+before)
	f.execs = func() int {
		text, err := os.ReadFile(notes)
		must(f.t, err)
		must(f.t, os.WriteFile(notes, nil, 0o600))
		return bytes.Count(text, []byte("\n"))
	}
}

// flusher is somebody else's iptables, which is not counted; on legacy it uses
// the common lock, whatever the environment of this process says.
func (f floor) flusher(line string) {
	f.t.Helper()
	nstest.Command(f.t, "env", append([]string{"UNCOUNTED=1", "XTABLES_LOCKFILE=" + lockFile, "iptables-" + string(f.backend), "-w", "5"}, strings.Fields(line)...)...)
}

// until bounds what hangs: it waits for at most a minute.
func (f floor) until(what string, is func() error) {
	f.t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if err = is(); err == nil {
			return
		}
	}
	f.t.Fatalf("not %s: %v\n%s", what, err, f.log)
}

// healed waits until n flushes are told and healed.
func (f floor) healed(n int) Flush {
	f.t.Helper()
	f.until(fmt.Sprintf("healed from %d flushes", n), func() error {
		s := f.d.Status()
		if len(s.Flushes) != n {
			return fmt.Errorf("%d flush records", len(s.Flushes))
		}
		return s.Ready()
	})
	return f.d.Status().Flushes[0]
}

// TestExecProbeHeals: where only the programs may be asked, a flush is noticed
// and healed, and what we execute meanwhile gives us no reason to execute more.
func TestExecProbeHeals(t *testing.T) {
	onFloor(t, func(f floor) {
		if got := f.metrics("exec_probe_mode")["exec_probe_mode"]; got != 1 {
			t.Errorf("exec_probe_mode is %v", got)
		}
		time.Sleep(1500 * time.Millisecond) // what follows the start
		f.execs()
		const quiet = 2 * time.Second
		time.Sleep(quiet)
		const look = 2 // one save of each family, which holds few rules
		idle := f.execs()
		t.Logf("%d execs in %s of quiet", idle, quiet)
		if most := look * 4; idle > most {
			t.Errorf("%d execs in %s of quiet, want at most %d", idle, quiet, most)
		}

		f.flusher("-t nat -F")
		if got := f.healed(1); got.Outcome != reload.Proved || got.Kind != canary.Emptied {
			t.Errorf("the record says %+v", got)
		}
		time.Sleep(2 * time.Second)
		n := f.execs()
		t.Logf("%d execs within 2 s of a flush", n)
		if n > 100 {
			t.Errorf("%d execs within 2 s of a flush: it feeds itself", n)
		}
		time.Sleep(quiet)
		if n := f.execs(); n > look*4 {
			t.Errorf("%d execs in %s of quiet after a flush, before it %d", n, quiet, idle)
		}
		if got := nstest.Command(t, "iptables-"+string(f.backend), "-t", "nat", "-S", "KUBE-SERVICES"); !strings.Contains(got, "10.96.0.1") {
			t.Errorf("after the replay KUBE-SERVICES holds %q", got)
		}
	})
}

// TestExecProbeBesideAHeldLock: a held lock is no flush; a flush by who keeps
// it is noticed, told and counted, and healed when the lock is let go of.
func TestExecProbeBesideAHeldLock(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		f := startFloor(t, iptables.Legacy, time.Hour) // nobody waits for the poll here
		look := func() {
			_, err := f.d.Look(t.Context())
			must(t, err)
		}
		moved := f.moved(func() {
			release := holdLock(t)
			for range 3 {
				look()
			}
			release()
			look()
		}, lossMetrics...)
		wantMoved(t, moved, series{})
		f.wantReady()

		release := holdLock(t)
		nstest.Command(t, "env", "UNCOUNTED=1", "XTABLES_LOCKFILE=/run/another.lock", "iptables-legacy", "-w", "5", "-t", "nat", "-F")
		look()
		tries := func() int {
			return int(f.metrics("restore_failures_total")["restore_failures_total{family=ipv4,reason=lock}"])
		}
		f.until("tried again and again", func() error {
			if n := tries(); n < 4 {
				return fmt.Errorf("the held lock is counted %d times", n)
			}
			return nil
		})
		f.wantNotReady("emptied")
		if n := f.metrics("replays_total")["replays_total{family=ipv4,result=proved}"]; n != 0 {
			t.Errorf("%v replays are said to be proved without the lock", n)
		}
		f.wantLog("fuser")
		release()
		// How long it takes now is the machine's affair. The first try that finds the
		// lock free is the one that heals, and none was put off for longer than the others.
		failed := tries()
		record := f.healed(1)
		now := tries()
		if now > failed+1 || record.Attempts != now+1 {
			t.Errorf("%d tries had failed after the release and %d in the end, and the record tells of %d", failed, now, record.Attempts)
		}
		planned := regexp.MustCompile(`retryIn="[^"]*"`).FindAllString(f.log.String(), -1)
		if want := slices.Repeat([]string{fmt.Sprintf("retryIn=%q", firstTry)}, now); !slices.Equal(planned, want) {
			t.Errorf("%d tries failed, and the next ones were planned with %q", now, planned)
		}
	})
}

// TestExecProbeOfANativeTable: a table that iptables cannot print is unknown.
func TestExecProbeOfANativeTable(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "nft")
		f := startFloor(t, iptables.NFT, time.Second)
		moved := f.moved(func() {
			nstest.Command(t, "nft", "add", "rule", "ip", "nat", canary.DefaultChain, "ct", "state", "vmap", "{ new : accept }")
			f.until("unknown", func() error {
				if err := f.d.Status().Ready(); err == nil || !strings.Contains(err.Error(), "unknown") {
					return fmt.Errorf("ready: %w", err)
				}
				return nil
			})
			time.Sleep(2 * time.Second)
		}, lossMetrics...)
		wantMoved(t, moved, series{})
	})
}

// holdLock takes the common lock and returns how to let go of it.
func holdLock(t *testing.T) (release func()) {
	t.Helper()
	fd, err := unix.Open(lockFile, unix.O_RDONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	must(t, err)
	must(t, unix.Flock(fd, unix.LOCK_EX))
	return func() { must(t, unix.Close(fd)) }
}
