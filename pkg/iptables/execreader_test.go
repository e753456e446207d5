package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// countExecs puts a script before the family's programs that notes each exec,
// and returns how many there were since it was asked last, by program.
func countExecs(t *testing.T, backend Backend, family rules.Family) func() map[string]int {
	t.Helper()
	const notes = "/run/execs"
	dir := t.TempDir()
	for _, suffix := range []string{"", "-save", "-restore"} {
		name := program(backend, family, suffix)
		script := fmt.Sprintf("#!/bin/sh\necho %s >> %s\nexec %s \"$@\"\n", name, notes, lookUp(name))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() map[string]int {
		t.Helper()
		text, err := os.ReadFile(notes)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if err := os.WriteFile(notes, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		counts := map[string]int{}
		for line := range bytes.Lines(text) {
			counts[strings.TrimSpace(string(line))]++
		}
		return counts
	}
}

// TestExecProbe: through the programs alone a probe shows what the kernel
// shows, an intact look is one save of a few rules or, beside many, a few lists
// and no save, and nothing is created.
func TestExecProbe(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		asked := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		execs := countExecs(t, backend, family)
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}, ExecProbe: true})
		if asked.Info().ExecProbe || !k.Info().ExecProbe {
			t.Fatalf("info says %+v and %+v", asked.Info(), k.Info())
		}
		places := []Place{{rules.Nat, canary}, {rules.Nat, "PREROUTING"}, {rules.Nat, "GONE"}, {rules.Mangle, canary}}
		check := func(step string) Sighting {
			t.Helper()
			got := mustProbe(t, k, family, places...)
			if diff := cmp.Diff(mustProbe(t, asked, family, places...).Holdings, got.Holdings); diff != "" {
				t.Errorf("%s: by asking the kernel and by executing iptables (-kernel +exec):\n%s", step, diff)
			}
			return got
		}
		before := tablesOf(t, backend)
		check("nothing there")
		mustStamp(t, k, family)
		if diff := cmp.Diff(before, tablesOf(t, backend)); diff != "" {
			t.Errorf("looking created tables (-before +after):\n%s", diff)
		}

		write := func(line string) { t.Helper(); iptablesCommand(t, backend, family, line) }
		write("-t nat -N " + canary)
		write("-t nat -A " + canary + " -m comment --comment canaryd-canary:1")
		write("-t nat -A PREROUTING -p tcp -m comment --comment canaryd-witness")
		write("-t nat -A PREROUTING -m comment --comment canaryd-witness:1")
		write("-t nat -N OTHER")
		intact := check("planted")
		stamp := mustStamp(t, k, family)
		if stamp.Exact {
			t.Error("a stamp that knows of a few chains only is called exact")
		}

		execs()
		if again := mustStamp(t, k, family); again != stamp {
			t.Errorf("the stamp moved from %v to %v, and nobody wrote", stamp, again)
		}
		want := map[string]int{program(backend, family, "-save"): 1}
		if diff := cmp.Diff(want, execs()); diff != "" {
			t.Errorf("execs of an intact look (-want +got):\n%s", diff)
		}
		many := "*nat\n" + strings.Repeat("-A OTHER -p tcp -j RETURN\n", 2000) + "COMMIT\n"
		nstest.CommandInput(t, many, program(backend, family, "-restore"), "--noflush", "-w", "5")
		check("many rules")
		stamp = mustStamp(t, k, family)
		execs()
		if again := mustStamp(t, k, family); again != stamp {
			t.Errorf("the stamp moved from %v to %v, and nobody wrote", stamp, again)
		}
		if backend == NFT {
			want = map[string]int{program(backend, family, ""): 3} // nothing is listed in mangle, which is not there
		}
		if diff := cmp.Diff(want, execs()); diff != "" {
			t.Errorf("execs of an intact look beside many rules (-want +got):\n%s", diff)
		}
		check("again")
		if n := execs()[program(backend, family, "-save")]; n != 1 {
			t.Errorf("a probe executes iptables-save %d times", n)
		}

		write("-t nat -A OTHER -j ACCEPT")
		if now := check("a rule elsewhere"); now.Digest == intact.Digest {
			t.Error("the digest misses a rule")
		}
		for _, line := range []string{
			"-t nat -R " + canary + " 1 -m comment --comment canaryd-canary:2", "-t nat -D PREROUTING 2",
			"-t nat -F", "-t nat -X " + canary, "-t nat -N " + canary,
		} {
			stamp := mustStamp(t, k, family)
			write(line)
			if now := mustStamp(t, k, family); now == stamp {
				t.Errorf("%s does not move the stamp", line)
			}
			check(line)
		}
		if backend == NFT {
			nstest.Command(t, "nft", "flush", "ruleset")
			check("the table deleted")
		}
	})
}

// TestExecProbeIsNeverSureAlone: what one of the two programs does not show and
// the other does is unknown and not missing.
func TestExecProbeIsNeverSureAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}, ExecProbe: true})
		place := Place{rules.Nat, canary}
		iptablesCommand(t, backend, family, "-t nat -N "+canary)
		if got := mustProbe(t, k, family, place).Holdings[place]; got.Presence != Present {
			t.Fatalf("the canary is %v", got)
		}
		r := k.reader.(*execReader)
		real, lists := r.save.tools[family], r.lists[family]

		// The list fails, whatever for: the stamp moves, and the save decides.
		r.last[family] = execLook{stands: []Place{place}, list: true}
		stamp := mustStamp(t, k, family)
		broken := filepath.Join(t.TempDir(), "iptables")
		write := func(script string) {
			t.Helper()
			if err := os.WriteFile(broken, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		write("echo 'iptables v1.8.9 (nf_tables)'")
		fails, err := newLister(t.Context(), family, broken)
		if err != nil {
			t.Fatal(err)
		}
		write("echo 'No chain/target/match by that name.' >&2; exit 1")
		r.lists[family] = fails
		if now := mustStamp(t, k, family); now == stamp {
			t.Error("a list that fails does not move the stamp")
		}
		if got := mustProbe(t, k, family, place).Holdings[place]; got.Presence != Present {
			t.Errorf("because a list failed the canary is %v", got)
		}
		r.lists[family] = lists

		// The save leaves the chain out.
		write("printf '*nat\\n:PREROUTING ACCEPT [0:0]\\nCOMMIT\\n'")
		r.save.tools[family] = tools{real.iptables, broken, real.restore}
		if got, err := k.Probe(t.Context(), family, []Place{place}); err == nil || !strings.Contains(err.Error(), "lists it") {
			t.Errorf("because a save left it out the canary is %v, error %v", got.Holdings, err)
		}
		// Both agree.
		r.lists[family] = fails
		write("case $* in *-S*) exit 1;; esac; printf '*nat\\n:PREROUTING ACCEPT [0:0]\\nCOMMIT\\n'")
		if got := mustProbe(t, k, family, place).Holdings[place]; got.Presence != NoChain {
			t.Errorf("both say that it is missing, and the canary is %v", got)
		}
		// The save fails, or says that it cannot print the table.
		for _, script := range []string{"exit 1", "echo \"# Table \\`nat' is incompatible, use 'nft' tool.\""} {
			write(script)
			if got, err := k.Probe(t.Context(), family, []Place{place}); err == nil {
				t.Errorf("%s: the canary is %v", script, got.Holdings)
			}
		}
		r.save.tools[family], r.lists[family] = real, lists
	})
}

// TestExecProbeOfANativeTable: the same, with a table that nft's own program
// made unreadable.
func TestExecProbeOfANativeTable(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		k := openKernel(t, Config{Backend: NFT, ExecProbe: true})
		place := Place{rules.Nat, canary}
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N "+canary)
		mustProbe(t, k, rules.IPv4, place)
		stamp := func(list bool) Stamp {
			t.Helper()
			k.reader.(*execReader).last[rules.IPv4] = execLook{stands: []Place{place}, list: list}
			return mustStamp(t, k, rules.IPv4)
		}
		listed, saved := stamp(true), stamp(false)
		nstest.Command(t, "nft", "add", "rule", "ip", "nat", canary, "ct", "state", "vmap", "{ new : accept }")
		if stamp(true) == listed || stamp(false) == saved {
			t.Error("the stamp did not move")
		}
		if got, err := k.Probe(t.Context(), rules.IPv4, []Place{place}); err == nil {
			t.Errorf("the canary is %v, and not unknown", got.Holdings)
		}
	})
}

// TestExecProbeBesideAHeldLock: looking needs no lock of others', and writing
// does.
func TestExecProbeBesideAHeldLock(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy")
		t.Setenv(lockVariable, "/run/elsewhere.lock")
		func() {
			k := openKernel(t, Config{Backend: Legacy, ExecProbe: true, LockWait: 50 * time.Millisecond})
			place := Place{rules.Nat, canary}
			iptablesCommand(t, Legacy, rules.IPv4, "-t nat -N "+canary)
			mustProbe(t, k, rules.IPv4, place)
			fd, err := tryLock(defaultLockFile)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			start := time.Now()
			mustStamp(t, k, rules.IPv4)
			if _, err := k.reader.(*execReader).lists[rules.IPv4].list(t.Context(), place); err != nil {
				t.Error(err)
			}
			if got := mustProbe(t, k, rules.IPv4, place).Holdings[place]; got.Presence != Present {
				t.Errorf("the canary is %v", got)
			}
			if took := time.Since(start); took > 4*time.Second {
				t.Errorf("looking took %s: it waited for a lock", took)
			}
			if _, err := k.Begin(t.Context()); !errors.Is(err, ErrLocked) {
				t.Errorf("Begin returns %v", err)
			}
			if err := k.Close(); err != nil {
				t.Error(err)
			}
		}()
		if got := os.Getenv(lockVariable); got != "/run/elsewhere.lock" {
			t.Errorf("after Close %s is %q", lockVariable, got)
		}
	})
}

// TestListEnds: a program that hangs is killed and unknown.
func TestListEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "iptables")
	script := "#!/bin/sh\ncase $* in --version) echo 'iptables v1.8.9 (legacy)';; *) exec sleep 300;; esac\n"
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := newLister(t.Context(), rules.IPv4, path)
	if err != nil {
		t.Fatal(err)
	}
	for _, after := range []time.Duration{0, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		start := time.Now()
		_, err := l.list(ctx, Place{rules.Nat, "X"})
		cancel()
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 30*time.Second {
			t.Errorf("after %s: %v", took, err)
		}
	}
}
