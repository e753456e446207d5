package here

import (
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time that this process and the programs that it
// executed, as far as they have ended, have used.
func CPUTime() time.Duration {
	return usedBy(unix.RUSAGE_SELF) + usedBy(unix.RUSAGE_CHILDREN)
}

// ThreadCPU returns the CPU time that the calling thread has used.
func ThreadCPU() time.Duration { return usedBy(unix.RUSAGE_THREAD) }

// usedBy returns the CPU time that getrusage(2) has of who.
func usedBy(who int) time.Duration {
	var use unix.Rusage
	if err := unix.Getrusage(who, &use); err != nil { // it cannot fail for what is asked here
		return 0
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}
