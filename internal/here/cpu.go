package here

import (
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time of this process, and of the programs that it executed and that
// have ended.
func CPUTime() time.Duration {
	return usedBy(unix.RUSAGE_SELF) + usedBy(unix.RUSAGE_CHILDREN)
}

// ThreadCPU returns the CPU time that the calling thread has used.
func ThreadCPU() time.Duration { return usedBy(unix.RUSAGE_THREAD) }

// usedBy returns the CPU time of who by getrusage(2).
func usedBy(who int) time.Duration {
	var use unix.Rusage
	if err := unix.Getrusage(who, &use); err != nil { // it cannot fail for these arguments
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}
