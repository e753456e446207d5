package canary

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

	child := exec.Command(os.Args[0], "-test.run=^TestHoldLockForParent$")
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
	holder, found := lockHolder(procFolder, path)
	in.Close()
	if err := child.Wait(); err != nil {
		t.Error(err)
	}
	if !found || int(holder.PID) != child.Process.Pid || holder.Genid != 0 || holder.Command == "" {
		t.Errorf("got %+v, %v; want the command line of process %d", holder, found, child.Process.Pid)
	}
	if _, found := lockHolder(procFolder, path); found {
		t.Error("a lock that was let go is held")
	}
}
