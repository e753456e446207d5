package watch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzProcess: for any content of a process's files in /proc, and of /proc/locks,
// a writer has short, printable names.
func FuzzProcess(f *testing.F) {
	f.Add("nft\n", "nft\x00flush\x00ruleset\x00", "50 (nft) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 900 1000 1\n", "0::/system.slice/cron.service\n", "1: FLOCK  ADVISORY  WRITE 50 INODE 0 EOF\n")
	f.Add(") S 1 (\n", "\x1b[2J\n", "50 () S 1 () S 50 50", "1:name=systemd:/a\n0::/", "1: -> FLOCK  ADVISORY  WRITE 50 INODE 0 EOF\n2: POSIX\n3: FLOCK A W 99999999999 INODE")
	// Each worker has one folder: making one for each input would cost more than
	// the test itself.
	proc := f.TempDir()
	lock := filepath.Join(proc, "lock")
	for _, dir := range []string{"50", "1"} {
		if err := os.Mkdir(filepath.Join(proc, dir), 0o700); err != nil {
			f.Fatal(err)
		}
	}
	if err := os.WriteFile(lock, nil, 0o600); err != nil {
		f.Fatal(err)
	}
	var stat unix.Stat_t
	if err := unix.Stat(lock, &stat); err != nil {
		f.Fatal(err)
	}
	inode := fmt.Sprintf("%02x:%02x:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev), stat.Ino)
	f.Fuzz(func(t *testing.T, comm, cmdline, stat, cgroup, locks string) {
		for name, text := range map[string]string{
			"50/comm": comm, "50/cmdline": cmdline, "50/stat": stat, "50/cgroup": cgroup, "1/stat": stat, "1/comm": comm,
			"locks": strings.ReplaceAll(locks, "INODE", inode),
		} {
			if err := os.WriteFile(filepath.Join(proc, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		w, ours := processWriter(proc, 50)
		if ours && parentOf(proc, 50) != os.Getpid() {
			t.Errorf("%+v is taken for a child of ours", w)
		}
		writers := []Writer{w}
		if holder, found := lockHolder(proc, lock); found {
			if int(holder.PID) == os.Getpid() || holder.PID == 0 {
				t.Errorf("the lock is held by %+v", holder)
			}
			writers = append(writers, holder)
		}
		for _, w := range writers {
			for _, shown := range append([]string{w.Comm, w.Command, w.Origin.Unit, w.Origin.Container.Name, w.Origin.String()}, w.Origin.Ancestors...) {
				if len(shown) > maxCommand || strings.ContainsFunc(shown, func(r rune) bool { return r < ' ' || r == 0x7f }) {
					t.Errorf("%q", shown)
				}
			}
			if len(w.Origin.Ancestors) > maxAncestors {
				t.Errorf("%d ancestors", len(w.Origin.Ancestors))
			}
		}
	})
}
