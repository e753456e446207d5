package watch

import (
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
)

const (
	// neighbourReach is how far a parent's number may be below a writer's. The
	// parent may have started other processes before: kube-proxy --cleanup starts
	// a dozen threads and some fifty programs.
	neighbourReach = 512
	// neighbourEvery is the shortest interval between two such searches: one
	// takes some 0.5 ms. Between them the last result counts.
	neighbourEvery = 100 * time.Millisecond
	// ticksPerSecond is the unit of a process's start in /proc, on all of Linux'
	// architectures that canaryd is built for.
	ticksPerSecond = 100
)

// A Neighbour is an owner's process that may have executed a writer. The writer
// or its parent was gone before it could be read. The neighbour lived at the
// commit, and its process number is a little lower than the writer's.
type Neighbour struct {
	PID   uint32
	Comm  string
	Since time.Time // when it started
}

// before reports whether the neighbour's number is a little lower than a
// writer's.
func (n Neighbour) before(pid uint32) bool {
	return n.PID != 0 && n.PID < pid && pid-n.PID <= neighbourReach
}

// neighbourOf returns the owner's process with the next lower number than that of a writer that
// is gone. Writer.Neighbour then names it as the possible parent. It returns none if proc is of
// another pid namespace.
func neighbourOf(proc string, pid uint32, now time.Time) Neighbour {
	if initial, err := nft.InitialPIDs(proc); err == nil && !initial {
		return Neighbour{}
	}
	for n := max(pid, 1) - 1; n > 1 && pid-n <= neighbourReach; n-- {
		if found, ok := ownerAt(proc, n, now); ok && found.before(pid) {
			return found
		}
	}
	return Neighbour{}
}

// ownerAt returns the process of a thread, if it is an owner's. now dates its start. A shell
// that runs a script with an owner's name does not count: the process has the script's name,
// but the shell's command line.
func ownerAt(proc string, thread uint32, now time.Time) (Neighbour, bool) {
	dir, err := openProcess(proc, thread)
	if err != nil {
		return Neighbour{}, false
	}
	defer dir.close()
	if !owners.Decides(dir.comm()) {
		return Neighbour{}, false
	}
	leader, err := openProcess(proc, dir.leader(thread))
	if err != nil {
		return Neighbour{}, false
	}
	defer leader.close()
	stat, ok := readStat(leader)
	program, _, _ := strings.Cut(leader.command(), " ")
	if !ok || !owners.Decides(stat.comm) || path.Base(program) != stat.comm {
		return Neighbour{}, false
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return Neighbour{}, false
	}
	age := time.Duration(up.Nano()) - time.Duration(stat.start)*(time.Second/ticksPerSecond)
	return Neighbour{dir.leader(thread), stat.comm, now.Add(-age)}, true
}

// leader returns the number of a thread's process; the thread's own number if that cannot be
// read.
func (p processFolder) leader(thread uint32) uint32 {
	for line := range strings.Lines(string(p.read("status", maxStat))) {
		if text, found := strings.CutPrefix(line, "Tgid:"); found {
			if tgid, err := strconv.ParseUint(strings.TrimSpace(text), 10, 32); err == nil {
				return uint32(tgid)
			}
		}
	}
	return thread
}
