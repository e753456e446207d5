package watch

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// commands returns the command lines of all noted holders, oldest first.
func commands(ws *Writers) []string {
	var list []string
	for _, w := range ws.Holders(time.Time{}) {
		list = append(list, w.Command)
	}
	return list
}

// TestOpenersAreNamed: an opener of the lock is noted at once, and again at its
// release, also after a replacement of the lock. canaryd and its children are not
// noted.
func TestOpenersAreNamed(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "xtables.lock")
	w := watchLock(t, path)
	noted := func(command string) int {
		n := 0
		for _, c := range commands(w.Writers) {
			if strings.Contains(c, command) {
				n++
			}
		}
		return n
	}
	for _, round := range []string{"it appears", "used", "deleted", "renamed over"} {
		switch round {
		case "deleted":
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			drain(t, w.Hints)
		case "renamed over":
			other := filepath.Join(dir, "other")
			holdLock(t, other)()
			if err := os.Rename(other, path); err != nil {
				t.Fatal(err)
			}
			drain(t, w.Hints)
		}
		holdLock(t, path)() // makes the lock if it is missing
		drain(t, w.Hints)

		before := len(commands(w.Writers))
		shell, release := holdLockElsewhere(t, path, true)
		eventually(t, func() bool { return len(commands(w.Writers)) == before+1 })
		release()
		eventually(t, func() bool { return len(commands(w.Writers)) == before+2 })
		both := w.Writers.Holders(time.Time{})[before:]
		if !both[0].Opened || both[1].Opened {
			t.Errorf("%s: it has opened the lock and let go of it, and is noted as %+v", round, both)
		}
		if both[0].PID != both[1].PID || both[0].Command != both[1].Command || !strings.Contains(both[0].Command, "TestHoldLockForParent") || both[1].Time.Before(both[0].Time) {
			t.Errorf("%s: a child of process %d is noted as %+v", round, shell, both)
		}
	}
	n := noted("TestHoldLockForParent")
	_, release := holdLockElsewhere(t, path, false)
	release()
	holdLock(t, path)()
	drain(t, w.Hints)
	if again := noted("TestHoldLockForParent"); again != n || slices.ContainsFunc(w.Writers.Holders(time.Time{}), func(w Writer) bool { return int(w.PID) == os.Getpid() }) {
		t.Errorf("we or a child of ours are noted: %q", commands(w.Writers))
	}
}

// TestTheLastOpenerIsWhoClosed: two processes opened the lock. The one that got
// it is named last when it releases the lock.
func TestTheLastOpenerIsWhoClosed(t *testing.T) {
	nstest.NeedRoot(t)
	nstest.NeedProgram(t, "flock")
	path := filepath.Join(t.TempDir(), "xtables.lock")
	holdLock(t, path)()
	w := watchLock(t, path)
	_, release := holdLockElsewhere(t, path, true)
	waiting := exec.Command("sh", "-c", `flock "$0" true; exit 0`, path)
	if err := waiting.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return len(commands(w.Writers)) == 2 })
	release()
	if err := waiting.Wait(); err != nil {
		t.Error(err)
	}
	eventually(t, func() bool { return len(commands(w.Writers)) >= 4 })
	got := commands(w.Writers)
	for i, want := range []string{"TestHoldLockForParent", "flock", "TestHoldLockForParent", "flock"} {
		if !strings.Contains(got[i], want) {
			t.Errorf("noted were %q; want %s at place %d", got, want, i)
		}
	}
}

// TestOpenersWithoutPrivilege: without the right to use fanotify the watcher uses
// lockHolder.
func TestOpenersWithoutPrivilege(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	holdLock(t, path)()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capset(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		if o, err := newOpenerWatch(new(Writers)); err == nil {
			o.close()
			t.Error("fanotify is allowed without a capability")
		}
		ctx, w := t.Context(), &LockWatcher{Path: path, Hints: NewHints(), Writers: new(Writers)}
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			<-w.Hints.C()
			// The lookup begins when the process opens the lock, perhaps before
			// it holds the lock.
			eventually(t, func() bool {
				_, release := holdLockElsewhere(t, path, true)
				testkit.Pass(t, 100*time.Millisecond, "how long a program holds the lock")
				release()
				<-w.Hints.C()
				return len(commands(w.Writers)) > 0
			})
		}()
		stop, cancel := contextUntil(ctx, watched)
		defer cancel()
		if _, err := w.watch(stop); stop.Err() == nil {
			t.Errorf("the watch ended: %v", err)
		}
		<-watched
	}()
	<-ended
}

// parentOf returns the pid of a process's parent, 0 if it is unknown.
func parentOf(proc string, pid uint32) int { return int(readProcess(proc, pid).parent) }

func TestParentOf(t *testing.T) {
	proc := fakeProc(t, 7, "a) b", "x")
	for text, want := range map[string]int{
		"7 (iptables) S 3 7 7 0": 3, "7 (a) S 9 (b) R 4 7": 4, "7 (iptables)": 0, "": 0, "7 (x) S y": 0,
	} {
		if err := os.WriteFile(filepath.Join(proc, "7", "stat"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := parentOf(proc, 7); got != want {
			t.Errorf("parent of %q is %d, want %d", text, got, want)
		}
	}
	if got := parentOf(procFolder, uint32(os.Getpid())); got != os.Getppid() {
		t.Errorf("our parent is %d, want %d", got, os.Getppid())
	}
	if got := parentOf(proc, 8); got != 0 {
		t.Errorf("the parent of nobody is %d", got)
	}
}
