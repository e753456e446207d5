package nodetest

import (
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// turns is the environment variable that names a file. The test that has a lock on it may keep
// the processors busy.
const turns = "CANARYD_TEST_TURNS"

// MainWithTurns is Main for a package whose tests take turns; see Turn.
func MainWithTurns(m *testing.M, flags ...string) int {
	if os.Getenv(turns) == "" {
		file, err := os.CreateTemp("", "canaryd-turns")
		if err != nil {
			return trouble(err)
		}
		defer os.Remove(file.Name())
		defer file.Close()
		if err := os.Setenv(turns, file.Name()); err != nil {
			return trouble(err)
		}
	}
	return Main(m, flags...)
}

// Turn waits for the processors, until done is called or the test ends. The tests of nodes run in
// processes of their own.
func (n *Node) Turn() (done func()) {
	n.Helper()
	file, err := os.Open(os.Getenv(turns))
	n.Must(err)
	n.Cleanup(func() { _ = file.Close() }) // it may be closed already
	n.Must(unix.Flock(int(file.Fd()), unix.LOCK_EX))
	return func() { n.Must(file.Close()) }
}

// AsUser runs do with another user's rights. Only this thread has them, and it ends with the
// goroutine, which is never unlocked from it.
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
