package here

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
)

// TestExcludeForParent is the second daemon, and no test of its own.
func TestExcludeForParent(t *testing.T) {
	name := os.Getenv("CANARYD_TEST_EXCLUDE")
	if name == "" {
		return
	}
	if squatted := os.Getenv("CANARYD_TEST_SQUAT"); squatted != "" {
		squat(squatted)
		return
	}
	release, err := exclude(name)
	if err != nil {
		fmt.Println("refused:", err)
		return
	}
	defer release()
	fmt.Println("alone")
	if os.Getenv("CANARYD_TEST_STAY") != "" {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent closes it
	}
}

// squat takes the name and accepts no connection; with "full" its queue is also full.
func squat(how string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: os.Getenv("CANARYD_TEST_EXCLUDE")})
	}
	if err == nil {
		err = unix.Listen(fd, 0)
	}
	for full := how == "full"; err == nil && full; {
		conn, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		full = unix.Connect(conn, &unix.SockaddrUnix{Name: os.Getenv("CANARYD_TEST_EXCLUDE")}) == nil
	}
	fmt.Println("squatting:", err)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func TestExclude(t *testing.T) {
	name := fmt.Sprintf("@canaryd.test.%d", os.Getpid())
	release, err := exclude(name)
	if err != nil {
		t.Fatal(err)
	}
	_, err = exclude(name)
	if !errors.Is(err, api.ErrAlreadyRunning) || !strings.Contains(err.Error(), fmt.Sprintf("process %d of user %d", os.Getpid(), os.Geteuid())) {
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

// child starts a second process of this test as another user and returns its first line. The
// process runs until the test ends.
func child(t *testing.T, uid uint32, env ...string) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestExcludeForParent$")
	cmd.Env = append(os.Environ(), append(env, "CANARYD_TEST_STAY=1")...)
	cmd.Dir = "/"
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_, _ = io.Copy(io.Discard, stdout)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// TestASquatterDoesNotKeepCanarydOut: an unprivileged process has the name, with a queue that
// is empty or full. canaryd must start anyway, and a second one must not.
func TestASquatterDoesNotKeepCanarydOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: only root can start a process of another user")
	}
	for _, how := range []string{"empty", "full"} {
		t.Run(how, func(t *testing.T) {
			name := fmt.Sprintf("@canaryd.test.%d.%s", os.Getpid(), how)
			if got := child(t, 65534, "CANARYD_TEST_EXCLUDE="+name, "CANARYD_TEST_SQUAT="+how); got != "squatting: <nil>\n" {
				t.Fatalf("the squatter says %q", got)
			}
			release, err := exclude(name)
			if err != nil {
				t.Fatalf("beside a squatter: %v", err)
			}
			defer release()
			if _, err := exclude(name); !errors.Is(err, api.ErrAlreadyRunning) {
				t.Errorf("a second one in this process: got %v", err)
			}
			if got := child(t, 0, "CANARYD_TEST_EXCLUDE="+name); !strings.HasPrefix(got, "refused:") {
				t.Errorf("a second process: %s", got)
			}
		})
	}
}

// TestTheNameIsFreeAgain: the squatter ends while canaryd runs under another name. A second
// canaryd gets the free name, finds the first one, and gives way.
func TestTheNameIsFreeAgain(t *testing.T) {
	name := fmt.Sprintf("@canaryd.test.%d.again", os.Getpid())
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	other, err := takeName(name)
	if err != nil {
		t.Fatal(err)
	}
	release := holdName(other)
	l.Close()
	if _, err := exclude(name); !errors.Is(err, api.ErrAlreadyRunning) {
		t.Errorf("beside a canaryd with another name: got %v", err)
	}
	release()
	release, err = exclude(name)
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	release()
}

// TestOneOfManyStarts: of several canaryds that start at the same time, at most one continues,
// and a canaryd that starts a moment later does.
func TestOneOfManyStarts(t *testing.T) {
	name := fmt.Sprintf("@canaryd.test.%d.many", os.Getpid())
	var all sync.WaitGroup
	var alone atomic.Int32
	for range 8 {
		all.Go(func() {
			release, err := exclude(name)
			if err == nil {
				if n := alone.Add(1); n > 1 {
					t.Errorf("%d at a time", n)
				}
				testkit.Pass(t, 10*time.Millisecond, "how long a canaryd has the name")
				alone.Add(-1)
				release()
			}
		})
	}
	all.Wait()
	release, err := exclude(name)
	if err != nil {
		t.Fatal(err)
	}
	release()
}
