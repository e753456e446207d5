package e2e

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestSquatters: another user's processes have canaryd's port and the name of its lock. It
// guards all the same and says so; a second canaryd does not start; and once the port is free
// it serves there.
func TestSquatters(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		port, err := net.Listen("tcp", tcp)
		n.Must(err)
		n.Cleanup(func() { port.Close() })
		n.Must(squat("@canaryd.lock"))

		d := n.Launch()
		healthy := func() error {
			if code, stdout, stderr := n.Canaryd("health", "ready"); code != 0 {
				return errors.New(stdout + stderr)
			}
			return nil
		}
		n.Until("canaryd to be healthy", healthy)
		n.Want(0, "health")
		d.WantLog("No metrics, health and page over HTTP", "address already in use", "trying again every 5s")
		n.Flush()
		n.Until("a repaired flush", func() error {
			if s := n.Status(); len(s.Flushes) == 0 || !s.Healthy {
				return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
			}
			return nil
		})
		n.Same("protected rules", protected, n.Protected())
		if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, "metrics and page are NOT served") {
			n.Errorf("status does not say that the port is taken:\n%s", stdout)
		}
		if code, _, stderr := n.Canaryd("run", "--socket=/run/second.sock"); code != 2 || !strings.Contains(stderr, "another canaryd runs") {
			n.Errorf("a second canaryd ends with %d: %s", code, stderr)
		}
		port.Close()
		n.Until("an answer at the port", nodetest.Ready)
		n.Until("a status without the port", func() error {
			if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "NOT served") {
				return errors.New(stdout)
			}
			return nil
		})
		d.Stop()
		if code, _, stderr := n.Canaryd("health"); code != 2 || !strings.Contains(stderr, "no canaryd is running") {
			n.Errorf("health without a canaryd ends with %d: %s", code, stderr)
		}
	})
}

// squat listens on a name as another user, until this process ends.
func squat(name string) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		const other = 65534
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), other, ^uintptr(0)); errno != 0 {
			done <- errno
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrUnix{Name: name})
		}
		if err == nil {
			err = unix.Listen(fd, 1)
		}
		done <- err
	}()
	return <-done
}
