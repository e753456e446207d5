package daemon

import (
	"time"

	"golang.org/x/sys/unix"
)

// CPUTime returns the CPU time that this process and the programs that it
// executed, as far as they have ended, have used.
func CPUTime() time.Duration {
	var total int64
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var use unix.Rusage
		if err := unix.Getrusage(who, &use); err == nil { // it cannot fail for these two
			total += use.Utime.Nano() + use.Stime.Nano()
		}
	}
	return time.Duration(total)
}
