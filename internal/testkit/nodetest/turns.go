package nodetest

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// turns is the environment variable with the path of a file. The test that locks the file may
// keep the processors busy.
const turns = "CANARYD_TEST_TURNS"

// MainWithTurns is Main for a package whose tests take turns; see Turn.
func MainWithTurns(m *testing.M, flags ...string) int {
	if os.Getenv(turns) == "" {
		file, err := os.CreateTemp("", "canaryd-turns")
		if err != nil {
			return failed(err)
		}
		defer os.Remove(file.Name())
		defer file.Close()
		if err := os.Setenv(turns, file.Name()); err != nil {
			return failed(err)
		}
	}
	return Main(m, flags...)
}

// Turn waits until this test may keep the processors busy. The turn lasts until done is called
// or the test ends. It uses a file lock because nodes are tested in processes of their own.
func (n *Node) Turn() (done func()) {
	n.Helper()
	file, err := os.Open(os.Getenv(turns))
	n.Must(err)
	n.Cleanup(func() { _ = file.Close() }) // it may be closed already
	n.Must(unix.Flock(int(file.Fd()), unix.LOCK_EX))
	return func() { n.Must(file.Close()) }
}

// AsUser runs do with another user's rights. Only one thread has them. The goroutine never
// unlocks the thread, so both end together.
func AsUser(uid int, do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			done <- fmt.Errorf("becoming user %d: %w", uid, errno)
			return
		}
		done <- do()
	}()
	return <-done
}
