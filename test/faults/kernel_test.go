package faults

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// nowAndThen, after an error, makes only every third call fail.
const nowAndThen = ":when=2+3"

// refuses makes these system calls fail with that error, in canaryd and its child processes.
func (n node) refuses(errno string, calls ...string) func() func() {
	return func() func() {
		n.Helper()
		nstest.NeedProgram(n.T, "strace")
		list := strings.Join(calls, ",")
		var said testlog.Log
		tracer := exec.CommandContext(n.Context(), "strace", "-f", "-o", "/run/strace", "-e", "trace="+list,
			"-e", "inject="+list+":error="+errno, "-p", strconv.Itoa(n.daemon.PID()))
		tracer.Stderr = &said
		n.Must(tracer.Start())
		n.Until("strace to be attached", func() error {
			if !strings.Contains(said.String(), "attached") {
				return fmt.Errorf("it says %q", said.String())
			}
			return nil
		})
		return func() {
			n.Helper()
			// strace 6.1 may not end on request, but wait for a thread, which waits for a child
			// that strace stops. If strace is killed at once, a stopped call fails with ENOSYS.
			n.Must(tracer.Process.Signal(unix.SIGINT))
			n.Until("strace to let go of canaryd, or to hang", n.untraced())
			_ = tracer.Process.Kill() // it may have ended
			_ = tracer.Wait()         // the error is the signal
			text, err := os.ReadFile("/run/strace")
			n.Must(err)
			if list != "execve" && !bytes.Contains(text, []byte("(INJECTED)")) {
				n.Errorf("no call of %s was refused: %s", list, said.String())
			}
		}
	}
}

// untraced returns a condition: no thread of canaryd is traced any more, or their number has
// not changed for many looks.
func (n node) untraced() func() error {
	const many = 40
	same, before := 0, 0
	return func() error {
		paths, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", n.daemon.PID()))
		n.Must(err)
		traced := 0
		for _, path := range paths {
			// A thread that has ended is not traced any more.
			if text, err := os.ReadFile(path); err == nil && !bytes.Contains(text, []byte("\nTracerPid:\t0\n")) {
				traced++
			}
		}
		if traced != before {
			same, before = 0, traced
		}
		if same++; traced > 0 && same < many {
			return fmt.Errorf("%d threads of canaryd are traced", traced)
		}
		return nil
	}
}

// noFiles leaves canaryd no new file descriptor.
func (n node) noFiles() func() {
	n.Helper()
	var before unix.Rlimit
	n.Must(unix.Prlimit(n.daemon.PID(), unix.RLIMIT_NOFILE, nil, &before))
	none := unix.Rlimit{Cur: 0, Max: before.Max}
	n.Must(unix.Prlimit(n.daemon.PID(), unix.RLIMIT_NOFILE, &none, nil))
	return func() { n.Must(unix.Prlimit(n.daemon.PID(), unix.RLIMIT_NOFILE, &before, nil)) }
}

// TestTheKernelRefuses: for a while the kernel refuses sockets, questions, answers, programs or
// descriptors.
func TestTheKernelRefuses(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := start(n)
		nft := n.Programs.With == iptables.NFT
		faults := []fault{
			{name: "sockets are refused", begin: d.refuses("EMFILE", "socket"), heals: !nft},
			{name: "nothing can be executed", begin: d.refuses("ENOMEM", "execve"), heals: true},
			{name: "no file can be opened", begin: d.noFiles, deaf: true},
		}
		if nft {
			faults = append(faults,
				fault{name: "questions are refused", begin: d.refuses("EPERM", "sendto", "sendmsg")},
				fault{name: "answers are lost", begin: d.refuses("ENOBUFS", "recvfrom", "recvmsg", "recvmmsg")},
				fault{name: "there is no room for a transaction", begin: d.refuses("EPERM", "setsockopt"), heals: true},
				fault{name: "now and then no answer", begin: d.refuses("ENOBUFS"+nowAndThen, "recvmsg", "recvmmsg"), either: true},
				fault{name: "now and then no question", begin: d.refuses("ENOBUFS"+nowAndThen, "sendmsg", "sendto", "socket"), either: true},
			)
		} else {
			faults = append(faults,
				fault{name: "tables cannot be read", begin: d.refuses("ENOMEM", "getsockopt")},
				fault{name: "tables cannot be written", begin: d.refuses("ENOMEM", "setsockopt")},
				fault{name: "now and then a table cannot be read", begin: d.refuses("EAGAIN"+nowAndThen, "getsockopt"), either: true},
				fault{name: "now and then nothing works", begin: d.refuses("ENOMEM"+nowAndThen, "getsockopt", "setsockopt", "socket", "execve", "flock"), either: true},
			)
		}
		for _, f := range faults {
			d.during(f)
		}
		d.daemon.Stop()
	})
}

// TestTheLockIsHeld: another process holds the xtables lock many times longer than --lock-wait,
// and flushes. The record says so at once, and names the holder. On nft canaryd does not take
// the lock.
func TestTheLockIsHeld(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := start(n, "--lock-wait=200ms")
		d.during(fault{
			name:  "the lock is held",
			heals: n.Programs.With == iptables.NFT,
			begin: func() func() {
				lock, err := os.OpenFile("/run/xtables.lock", os.O_RDONLY|os.O_CREATE, 0o600)
				n.Must(err)
				n.Must(unix.Flock(int(lock.Fd()), unix.LOCK_EX))
				return func() { n.Must(lock.Close()) }
			},
			while: func() {
				failed := func() float64 {
					return nodetest.Sum(n.Metrics(), "restore_failures_total", `reason="lock"`)
				}
				if n.Programs.With == iptables.Legacy {
					n.Until("a try to fail because of the lock", some(failed))
					record := n.Status().Flushes[0]
					if text, _ := n.Want(1, "status"); record.Outcome != string(api.WaitingLock) || !strings.Contains(text, fmt.Sprintf("waiting: the lock, held by pid %d (", os.Getpid())) {
						n.Errorf("the record is %+v, and status prints\n%s", record, text)
					}
				} else if got := failed(); got > 0 {
					n.Errorf("%v tries failed because of the lock", got)
				}
			},
		})
		d.daemon.Stop()
	})
}

// TestADirectReplayIsRefused: with --replay=direct there is no other path for a transaction
// that the kernel refuses.
func TestADirectReplayIsRefused(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := start(n, "--replay=direct")
		for _, f := range []fault{
			{name: "there is no room for a transaction", begin: d.refuses("EPERM", "setsockopt")},
			{name: "sockets are refused", begin: d.refuses("EMFILE", "socket")},
		} {
			before := nodetest.Sum(n.Metrics(), "restore_failures_total")
			f.while = func() {
				n.Until(f.name+": the loss to show", some(func() float64 { return n.Metrics()["loss_since_timestamp_seconds{}"] }))
				n.Until(f.name+": a failure to be counted", some(func() float64 {
					return nodetest.Sum(n.Metrics(), "restore_failures_total") - before
				}))
			}
			d.during(f)
		}
		d.daemon.Stop()
	})
}

// TestNetlinkIsRefusedAtStart: canaryd ends with one line about it, and has written nothing.
func TestNetlinkIsRefusedAtStart(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		type end struct {
			text []byte
			err  error
		}
		ended := make(chan end)
		go func() { // the thread loses netlink for good, and ends with the goroutine
			err := nstest.Without(nstest.LackNFT())
			var text []byte
			if err == nil {
				text, err = exec.CommandContext(n.Context(), nodetest.Canaryd(), n.Flags("run")...).CombinedOutput()
			}
			ended <- end{text, err}
		}()
		got := <-ended
		var exit *exec.ExitError
		if !errors.As(got.err, &exit) || exit.ExitCode() != 2 {
			n.Errorf("it ended with %v, want exit code 2", got.err)
		}
		// The refused protocol, the feature that needs it, and the remedies.
		for _, say := range []string{"NETLINK_NETFILTER", "iptables-nft", "Protocol not supported", "modprobe nf_tables", "RestrictAddressFamilies", "--backend=legacy"} {
			if !bytes.Contains(got.text, []byte(say)) {
				n.Errorf("it does not say %q:\n%s", say, got.text)
			}
		}
		n.OneLine(string(got.text))
		n.Same("marks", nil, n.Marks())
	})
}
