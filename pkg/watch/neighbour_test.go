package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// TestNeighbour: the owner's process with the next lower number may have executed
// a writer that is gone. A thread leads to its process, and a script with an
// owner's name does not count.
func TestNeighbour(t *testing.T) {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		t.Fatal(err)
	}
	began := up.Sec*ticksPerSecond - 300 // three seconds ago
	put := func(t *testing.T, proc string, pid, leader int, comm, command string) {
		t.Helper()
		dir := filepath.Join(proc, strconv.Itoa(pid))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{
			"comm": comm + "\n", "cmdline": command, "status": fmt.Sprintf("Name:\t%s\nTgid:\t%d\n", comm, leader),
			"stat": fmt.Sprintf("%d (%s) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0", pid, comm, began),
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, test := range []struct {
		name  string
		setup func(t *testing.T, proc string)
		want  uint32
	}{
		{"nothing", func(*testing.T, string) {}, 0},
		{"kube-proxy", func(t *testing.T, proc string) {
			put(t, proc, 900, 900, "kube-proxy", "/bin/kube-proxy\x00--cleanup\x00")
		}, 900},
		{"one of its threads", func(t *testing.T, proc string) {
			put(t, proc, 600, 600, "kube-proxy", "kube-proxy\x00")
			put(t, proc, 990, 600, "kube-proxy", "kube-proxy\x00")
		}, 600},
		{"a new thread of an old one, next to a young one", func(t *testing.T, proc string) {
			put(t, proc, 300, 300, "kube-proxy", "kube-proxy\x00")
			put(t, proc, 900, 900, "kube-proxy", "kube-proxy\x00--cleanup\x00")
			put(t, proc, 990, 300, "kube-proxy", "kube-proxy\x00")
		}, 900},
		{"too long ago", func(t *testing.T, proc string) { put(t, proc, 480, 480, "kube-proxy", "kube-proxy\x00") }, 0},
		{"later than the writer", func(t *testing.T, proc string) { put(t, proc, 1001, 1001, "kube-proxy", "kube-proxy\x00") }, 0},
		{"a shell", func(t *testing.T, proc string) { put(t, proc, 990, 990, "bash", "bash\x00") }, 0},
		{"a script of that name", func(t *testing.T, proc string) { put(t, proc, 990, 990, "kube-proxy", "/bin/sh\x00./kube-proxy\x00") }, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc := t.TempDir()
			test.setup(t, proc)
			got := neighbourOf(proc, 1000, time.Now())
			if got.PID != test.want {
				t.Fatalf("got %+v, want process %d", got, test.want)
			}
			if age := time.Since(got.Since); got.PID != 0 && (age < 2*time.Second || age > 6*time.Second) {
				t.Errorf("it began %s ago, want 3 s", age)
			}
		})
	}
}

// TestNeighbourIsAskedOnce: in a storm of commits by unreadable processes the
// search runs ten times a second, and only for nft. kube-proxy --cleanup deletes
// two tables within that time.
func TestNeighbourIsAskedOnce(t *testing.T) {
	writers := &Writers{}
	w := CommitWatcher{Hints: NewHints(), Writers: writers, proc: t.TempDir()}
	for genid := range uint32(100) {
		w.note(nft.Commit{Genid: genid + 1, PID: 1000, Comm: "nft"})
	}
	first := w.neighbourAt
	if first.IsZero() || time.Since(first) > neighbourEvery {
		t.Fatalf("processes were looked up at %s", first)
	}
	w.neighbour = Neighbour{PID: 900, Comm: "kube-proxy", Since: first}
	for genid, pid := range map[uint32]uint32{201: 1000, 202: 1020, 203: 2000, 204: 800} {
		w.note(nft.Commit{Genid: genid, PID: pid, Comm: "nft"})
		if got := writers.Of(nft.Commit{Genid: genid}).Neighbour.PID == 900; got != (pid == 1000 || pid == 1020) && w.neighbourAt.Equal(first) {
			t.Errorf("a writer with the number %d has that neighbour: %t", pid, got)
		}
	}
	w.neighbourAt = time.Time{}
	w.note(nft.Commit{Genid: 101, PID: 1000, Comm: "iptables"})
	if !w.neighbourAt.IsZero() {
		t.Error("a process was looked up next to iptables")
	}
}

// TestNeighbourOfAHalfReadWriter: a readable nft still gets a neighbour if its
// parent was gone. It gets none if its parent was read, or is PID 1.
func TestNeighbourOfAHalfReadWriter(t *testing.T) {
	for _, test := range []struct {
		name   string
		parent int
		lives  bool
		unread bool
	}{
		{"its parent is gone", 900, false, true},
		{"its parent lives", 900, true, false},
		{"its parent is PID 1", 1, false, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			proc := t.TempDir()
			addProcess(t, proc, 1000, "nft", test.parent, 500)
			if test.lives {
				addProcess(t, proc, test.parent, "kube-proxy", 1, 400)
			}
			for name, text := range map[string]string{"comm": "nft\n", "cmdline": "nft\x00-f\x00-\x00"} {
				if err := os.WriteFile(filepath.Join(proc, "1000", name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			w := CommitWatcher{Hints: NewHints(), Writers: &Writers{}, proc: proc}
			w.note(nft.Commit{Genid: 1, PID: 1000, Comm: "nft"})
			got := w.Writers.Of(nft.Commit{Genid: 1})
			if got.Command != "nft -f -" || got.Unread != test.unread || w.neighbourAt.IsZero() == test.unread {
				t.Errorf("%+v; its neighbour was looked up at %s", got, w.neighbourAt)
			}
		})
	}
}
