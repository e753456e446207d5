package watch

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestHoldLockForParent is no test: it is the program that holds the lock.
func TestHoldLockForParent(t *testing.T) {
	path := os.Getenv("CANARYD_TEST_HOLD_LOCK")
	if path == "" {
		return
	}
	defer holdLock(t, path)()
	os.Stdout.WriteString("held\n")
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// holdLockElsewhere holds the lock in a child of ours, or in a child's child. It
// returns our child's pid and a function that releases the lock.
func holdLockElsewhere(t *testing.T, path string, grandchild bool) (pid int, release func()) {
	t.Helper()
	child := exec.Command(os.Args[0], "-test.run=^TestHoldLockForParent$")
	if grandchild {
		child = exec.Command("sh", append([]string{"-c", `"$0" "$@"; exit $?`}, child.Args...)...)
	}
	child.Env = append(os.Environ(), "CANARYD_TEST_HOLD_LOCK="+path)
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	return child.Process.Pid, func() {
		t.Helper()
		in.Close()
		if err := child.Wait(); err != nil {
			t.Error(err)
		}
	}
}

func TestLockHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "xtables.lock")
	if _, found := lockHolder(procFolder, path); found {
		t.Error("a lock that does not exist is held")
	}
	release := holdLock(t, path)
	if _, found := lockHolder(procFolder, path); found {
		t.Error("what we hold ourselves is reported")
	}
	release()

	_, release = holdLockElsewhere(t, path, false)
	if holder, found := lockHolder(procFolder, path); found {
		t.Errorf("a child of ours is reported: %+v", holder)
	}
	release()

	shell, release := holdLockElsewhere(t, path, true)
	holder, found := lockHolder(procFolder, path)
	parent := parentOf(procFolder, holder.PID)
	release()
	if !found || parent != shell || holder.Genid != 0 || holder.Command == "" {
		t.Errorf("got %+v, %v; want the command line of the child of process %d", holder, found, shell)
	}
	if _, found := lockHolder(procFolder, path); found {
		t.Error("a lock that was let go is held")
	}
}
