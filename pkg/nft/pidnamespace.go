package nft

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// initialPIDNamespace is the inode of the first pid namespace (PROC_PID_INIT_INO
// of linux/proc_ns.h), a constant of the kernel since Linux 3.8.
const initialPIDNamespace = 0xEFFFFFFC

// InitialPIDs reports whether process numbers in this proc file system ("/proc")
// are of the initial pid namespace. The kernel names a commit's process by these
// numbers (Commit.PID). In a pod's own pid namespace the same number is another
// process.
func InitialPIDs(proc string) (bool, error) {
	var s unix.Stat_t
	if err := unix.Stat(proc+"/self/ns/pid", &s); err != nil {
		return false, fmt.Errorf("asking for the pid namespace of %s: %w", proc, err)
	}
	return s.Ino == initialPIDNamespace, nil
}
