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
	// neighbourReach is how many numbers below a writer belong to what its parent may have started
	// since it began: kube-proxy --cleanup starts a dozen threads and some fifty programs.
	neighbourReach = 512
	// neighbourEvery is how often processes are looked up so, at most: it takes some 0.5 ms. Until
	// then the last one counts.
	neighbourEvery = 100 * time.Millisecond
	// ticksPerSecond is the unit of a process's start in /proc, on all of Linux' architectures that
	// canaryd is built for.
	ticksPerSecond = 100
)

// A Neighbour is an owner's process that lived when a writer committed that was gone, or whose
// parent was, before it could be read. The neighbour had got a process number shortly before the
// writer, and may have executed it.
type Neighbour struct {
	PID   uint32
	Comm  string
	Since time.Time // when it had started
}

// before reports whether it has its number shortly before a writer.
func (n Neighbour) before(pid uint32) bool {
	return n.PID != 0 && n.PID < pid && pid-n.PID <= neighbourReach
}

// neighbourOf returns the owner's process with the next lower number than that of a writer that is
// gone. There is none where /proc is of another pid namespace.
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

// ownerAt returns the process of a thread, if it is an owner's. A shell that runs a script of an
// owner's name is called as the script, and its command line is the shell's.
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

// leader returns the number of the process that a thread belongs to.
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
