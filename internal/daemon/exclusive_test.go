package daemon

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// TestExcludeForParent is no test: it is the second daemon.
func TestExcludeForParent(t *testing.T) {
	name := os.Getenv("CANARYD_TEST_EXCLUDE")
	if name == "" {
		return
	}
	release, err := exclude(name)
	if err != nil {
		fmt.Println("refused:", err)
		return
	}
	release()
	fmt.Println("alone")
}

func TestExclude(t *testing.T) {
	name := fmt.Sprintf("@canaryd.test.%d", os.Getpid())
	release, err := exclude(name)
	if err != nil {
		t.Fatal(err)
	}
	_, err = exclude(name)
	if !errors.Is(err, ErrAlreadyRunning) || !strings.Contains(err.Error(), fmt.Sprintf("process %d of user %d", os.Getpid(), os.Geteuid())) {
		t.Errorf("a second one in this process: got %v", err)
	}
	second := func(attr *syscall.SysProcAttr) string {
		child := exec.Command(os.Args[0], "-test.run=^TestExcludeForParent$")
		child.Env = append(os.Environ(), "CANARYD_TEST_EXCLUDE="+name)
		child.SysProcAttr = attr
		out, err := child.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := second(nil); !strings.HasPrefix(got, "refused:") {
		t.Errorf("a second process in this network namespace: %s", got)
	}
	elsewhere := &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	if got := second(elsewhere); !strings.HasPrefix(got, "alone") {
		t.Errorf("a process in another network namespace: %s", got)
	}
	release()
	if got := second(nil); !strings.HasPrefix(got, "alone") {
		t.Errorf("after the release: %s", got)
	}
}
