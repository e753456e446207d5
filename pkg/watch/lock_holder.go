package watch

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// LockHolder returns the other process that holds the lock at path right now. It
// takes 5 to 15 ms.
func LockHolder(path string) (Writer, bool) { return lockHolder(procFolder, path) }

// lockHolder returns the process that holds the lock at path right now, according
// to /proc/locks. It is called when a process opened the lock. That process
// flocks the lock a moment later, so lockHolder may find no holder or the
// previous one. A holder need not write. The result is a hint for people and has
// Genid 0.
//
// lockHolder does not return canaryd, its children or a process of another pid
// namespace.
func lockHolder(proc, path string) (Writer, bool) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return Writer{}, false
	}
	locks, err := os.Open(filepath.Join(proc, "locks"))
	if err != nil {
		return Writer{}, false
	}
	defer locks.Close()
	inode := fmt.Sprintf("%02x:%02x:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev), stat.Ino)
	for lines := bufio.NewScanner(locks); lines.Scan(); {
		// "1: FLOCK ADVISORY WRITE 1234 00:17:56 0 EOF"; in the line of a waiting
		// process the second word is "->".
		words := strings.Fields(lines.Text())
		if len(words) < 6 || words[1] != "FLOCK" || words[5] != inode {
			continue
		}
		pid, err := strconv.ParseUint(words[4], 10, 32)
		if err != nil || pid == 0 || int(pid) == os.Getpid() {
			return Writer{}, false
		}
		w, ours := processWriter(proc, uint32(pid))
		return w, !ours
	}
	return Writer{}, false
}
