package watch

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
)

// holdLock uses the lock as iptables-legacy does, and returns a function that
// releases it.
func holdLock(t *testing.T, path string) (release func()) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return func() { unix.Close(fd) }
}

// watchLock watches path until the test ends, and returns when the watch has
// begun.
func watchLock(t *testing.T, path string) *LockWatcher {
	t.Helper()
	w := &LockWatcher{Path: path, Hints: NewHints(), Writers: new(Writers)}
	t.Cleanup(start(w.Run))
	waitHint(w.Hints)
	drain(t, w.Hints)
	return w
}

// contextUntil returns a context that ends when done is closed.
func contextUntil(ctx context.Context, done <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		select {
		case <-done:
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// waitHint waits for a hint.
func waitHint(h *Hints) { <-h.C() }

// drain takes hints until none arrives for a while.
func drain(t *testing.T, h *Hints) {
	t.Helper()
	for hinted := true; hinted; {
		hinted = false
		testkit.Pass(t, 50*time.Millisecond, "that no further hint comes")
		select {
		case <-h.C():
			hinted = true
		default:
		}
	}
}

// mustHint holds the lock and expects a hint at its release, not before.
func mustHint(t *testing.T, w *LockWatcher) {
	t.Helper()
	release := holdLock(t, w.Path)
	drain(t, w.Hints) // the lock may be new, which gives a hint of its own
	before := w.Hints.Counts()[SourceLock]
	release()
	waitHint(w.Hints)
	if after := w.Hints.Counts()[SourceLock]; after == before {
		t.Errorf("the release was not counted as a hint of the lock")
	}
}

func TestLockRelease(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	holdLock(t, path)()
	w := watchLock(t, path)
	mustHint(t, w)
	mustHint(t, w)
	if n := w.Hints.Counts()[SourceOverflow]; n != 0 {
		t.Errorf("%d overflows, want none", n)
	}
}

func TestLockAppearsLater(t *testing.T) {
	w := watchLock(t, filepath.Join(t.TempDir(), "xtables.lock"))
	holdLock(t, w.Path)()
	waitHint(w.Hints)
	drain(t, w.Hints)
	mustHint(t, w)
}

func TestLockDeletedAndMadeAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	holdLock(t, path)()
	w := watchLock(t, path)
	for range 3 {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		mustHint(t, w)
		mustHint(t, w)
	}
}

func TestLockDeletedWhileHeld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	w := watchLock(t, path)
	release := holdLock(t, path)
	drain(t, w.Hints)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	holdLock(t, path)()
	drain(t, w.Hints)
	// A process that holds the deleted lock may still write to the tables.
	release()
	waitHint(w.Hints)
	mustHint(t, w)
}

func TestLockReplacedByRename(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "xtables.lock")
	holdLock(t, path)()
	w := watchLock(t, path)
	other := filepath.Join(dir, "new")
	holdLock(t, other)()
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	waitHint(w.Hints)
	mustHint(t, w)
}

func TestLockMovedAway(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "xtables.lock")
	holdLock(t, path)()
	w := watchLock(t, path)
	away := filepath.Join(dir, "away")
	if err := os.Rename(path, away); err != nil {
		t.Fatal(err)
	}
	drain(t, w.Hints)
	holdLock(t, away)()
	drain(t, w.Hints)
	before := w.Hints.Counts()[SourceLock]
	holdLock(t, away)()
	testkit.Pass(t, 50*time.Millisecond, "that no hint comes")
	if after := w.Hints.Counts()[SourceLock]; after != before {
		t.Error("a file that is the lock no longer still gives hints")
	}
	mustHint(t, w)
}

func TestLockFolderAppearsLater(t *testing.T) {
	t.Parallel() // it waits for rearmEvery
	folder := filepath.Join(t.TempDir(), "run")
	w := watchLock(t, filepath.Join(folder, "xtables.lock"))
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	holdLock(t, w.Path)()
	waitHint(w.Hints) // within rearmEvery
	drain(t, w.Hints)
	mustHint(t, w)
	if err := os.Remove(w.Path); err != nil {
		t.Fatal(err)
	}
	mustHint(t, w)
}

// TestSlowHolderKeepsNoHintBack: the kernel may take 15 ms to list the locks;
// here the list ends only after the hints.
func TestSlowHolderKeepsNoHintBack(t *testing.T) {
	path, locks := filepath.Join(t.TempDir(), "xtables.lock"), filepath.Join(t.TempDir(), "locks")
	if err := unix.Mkfifo(locks, 0o600); err != nil {
		t.Fatal(err)
	}
	w := &LockWatcher{Path: path, Hints: NewHints(), Writers: new(Writers), proc: filepath.Dir(locks)}
	t.Cleanup(start(w.Run))
	t.Cleanup(func() {
		// A reader that waits for the list gets an empty one and none after it,
		// so that Run can end.
		fifo, err := os.OpenFile(locks, os.O_RDWR, 0)
		if err == nil {
			err = os.Remove(locks)
			fifo.Close()
		}
		if err != nil {
			t.Error(err)
		}
	})
	waitHint(w.Hints)
	drain(t, w.Hints)
	for range 3 {
		mustHint(t, w)
	}
}

func TestOtherFilesOfTheFolderGiveNoHint(t *testing.T) {
	dir := t.TempDir()
	w := watchLock(t, filepath.Join(dir, "xtables.lock"))
	holdLock(t, filepath.Join(dir, "other"))()
	testkit.Pass(t, 50*time.Millisecond, "that no hint comes")
	if looked(w.Hints) {
		t.Error("a hint for a file that is not the lock")
	}
}
