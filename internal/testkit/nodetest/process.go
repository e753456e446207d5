package nodetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

const (
	// HTTP is the address of the daemon.
	HTTP = "http://" + canaryd.Address
	// socket is the default path of the control socket.
	socket = "/run/canaryd/canaryd.sock"
)

// A Process is a running canaryd.
type Process struct {
	*canaryd.Process
	n     *Node
	asked atomic.Bool // whether its end is expected
}

// Launch starts the daemon.
func (n *Node) Launch(flags ...string) *Process {
	n.Helper()
	n.logs++
	base := n.Flags("run")
	if long := os.Getenv(settle); long != "" {
		base = append(base, "--settle="+long)
	}
	line := slices.Concat(n.Under, []string{Canaryd()}, base, flags)
	cmd := exec.CommandContext(n.Context(), line[0], line[1:]...)
	cmd.Env = append(os.Environ(), n.Env...)
	started, err := canaryd.Start(cmd, fmt.Sprintf("/run/canaryd-%d.log", n.logs))
	n.Must(err)
	p := &Process{Process: started, n: n}
	n.newest.Store(p)
	n.Cleanup(func() {
		n.Must(p.Process.Kill())
		if n.Failed() {
			n.Logf("%s:\n%s", strings.Join(line, " "), p.Log())
		}
	})
	return p
}

// Start starts the daemon, and returns when it is ready and has a generation.
func (n *Node) Start(flags ...string) *Process {
	n.Helper()
	p := n.Launch(flags...)
	n.Until("canaryd to be ready", func() error {
		if !p.Running() {
			n.Fatalf("canaryd ended at once: %v\n%s", p.Err(), p.Log())
		}
		if err := Ready(); err != nil {
			return err
		}
		if s := n.Status(); s.Generation.Rules == 0 && !slices.Contains(flags, "--max-stored-age=1ms") {
			return errors.New("no generation")
		}
		return nil
	})
	return p
}

// Stop ends the daemon like a service manager.
func (p *Process) Stop() {
	p.n.Helper()
	p.asked.Store(true)
	if err := p.Process.Stop(testkit.Left(p.n)); err != nil {
		p.n.Fatalf("after SIGTERM canaryd ended with %v, want exit code 0\n%s", err, p.Log())
	}
}

// Kill ends the daemon like the out-of-memory killer.
func (p *Process) Kill() {
	p.n.Helper()
	p.asked.Store(true)
	p.n.Must(p.Process.Kill())
}

// End waits until the daemon has ended by itself.
func (p *Process) End() {
	p.n.Helper()
	p.asked.Store(true)
	p.n.Until("canaryd to end", func() error {
		if p.Running() {
			return errors.New("it runs")
		}
		return nil
	})
}

// Signal sends the daemon a signal.
func (p *Process) Signal(s syscall.Signal) {
	p.n.Helper()
	if slices.Contains([]syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL}, s) {
		p.asked.Store(true)
	}
	p.n.Must(p.Process.Signal(s))
}

// Suspend stops the daemon until it gets SIGCONT, and returns when each of its threads has
// stopped. Their state is then T or, if the daemon is traced, t. The kernel gives SIGSTOP to
// one thread. The others continue until that thread is on a core again or, in a commit of
// nf_tables, out of the kernel.
func (p *Process) Suspend() {
	p.n.Helper()
	p.Signal(syscall.SIGSTOP)
	p.n.Until("each thread of canaryd to stop", func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.PID()))
		if err == nil && len(threads) == 0 {
			err = errors.New("canaryd has no thread")
		}
		for _, thread := range threads {
			status, readErr := os.ReadFile(thread)
			if readErr != nil || !bytes.Contains(bytes.ToUpper(status), []byte("\nSTATE:\tT ")) {
				return fmt.Errorf("%s: %v\n%s", thread, readErr, status)
			}
		}
		return err
	})
}

// WantLog fails the test unless a line of the log contains all of these words.
func (p *Process) WantLog(words ...string) {
	p.n.Helper()
	log := p.Log()
	for _, line := range strings.Split(log, "\n") {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return
		}
	}
	p.n.Errorf("no line of the log has %q:\n%s", words, log)
}

// Flags returns the arguments of a command with the flags that bind it to this node. All other
// flags keep their defaults.
func (n *Node) Flags(command string) []string {
	if slices.Contains([]string{"status", "health", "pause", "resume", "dismiss", "drill", "baseline", "version", "detect", "completion"}, command) {
		return []string{command}
	}
	return []string{command, "--backend=" + string(n.Programs.With), "--state-dir=/run/state"}
}

// Canaryd runs a command that ends without a signal.
func (n *Node) Canaryd(command string, flags ...string) (code int, stdout, stderr string) {
	n.Helper()
	return n.Exec(exec.CommandContext(n.Context(), Canaryd(), append(n.Flags(command), flags...)...))
}

// Exec runs a program that ends without a signal.
func (n *Node) Exec(cmd *exec.Cmd) (code int, stdout, stderr string) {
	n.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		n.Fatalf("%s: %v", cmd, err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// Want runs a command, and fails the test unless it ends with that exit code.
func (n *Node) Want(code int, command string, flags ...string) (stdout, stderr string) {
	n.Helper()
	got, stdout, stderr := n.Canaryd(command, flags...)
	if got != code {
		n.Errorf("canaryd %s %s: exit code %d, want %d\n%s%s", command, strings.Join(flags, " "), got, code, stdout, stderr)
	}
	if code == 2 {
		n.OneLine(stderr)
	}
	return stdout, stderr
}

// OneLine checks that an error is one line, log lines excepted.
func (n *Node) OneLine(stderr string) {
	n.Helper()
	var lines []string
	for line := range strings.Lines(stderr) {
		if !strings.HasPrefix(line, "I") && !strings.HasPrefix(line, "E") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "canaryd: ") {
		n.Errorf("want one line that begins with canaryd:, got %q", stderr)
	}
}

// Status returns the daemon's status, without the flushes of earlier runs.
func (n *Node) Status() scenario.Status {
	n.Helper()
	return own(n.WholeStatus())
}

// own returns a status without the flushes of earlier runs.
func own(s scenario.Status) scenario.Status {
	s.Flushes = slices.DeleteFunc(s.Flushes, func(r scenario.Record) bool { return r.Earlier })
	return s
}

// WholeStatus returns the daemon's status from the control socket, like canaryd status.
func (n *Node) WholeStatus() scenario.Status {
	n.Helper()
	return n.said(control.Client{Socket: socket}.Status(n.Context()))
}

// said converts the daemon's status, and fails the test on an error.
func (n *Node) said(s api.Status, err error) scenario.Status {
	n.Helper()
	n.Must(err)
	status, err := scenario.StatusOf(s)
	n.Must(err)
	return status
}

// Published returns the status that the daemon publishes over HTTP. It is cheaper for the
// daemon than WholeStatus.
func (n *Node) Published() scenario.Status {
	n.Helper()
	var s scenario.Status
	n.Must(json.Unmarshal([]byte(n.Get("/api/v1/status")), &s))
	return s
}

// Looked is Status after another look of the daemon at all tables. On a busy machine the daemon
// may not have noticed the test's last commands before.
func (n *Node) Looked() scenario.Status {
	n.Helper()
	return own(n.said(control.Client{Socket: socket}.Look(n.Context())))
}

// Healed waits until there are that many flush records and the node is healthy, even after
// another look. It returns the newest record.
func (n *Node) Healed(records int) scenario.Record {
	n.Helper()
	var newest scenario.Record
	n.Until(fmt.Sprintf("%d repaired flushes", records), func() error {
		for _, status := range []func() scenario.Status{n.Status, n.Looked} {
			s := status()
			if len(s.Flushes) < records || !s.Healthy {
				return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
			}
			newest = s.Flushes[0]
		}
		return Ready()
	})
	return newest
}

// PartlyHealed waits until the node has that many flush records and the newest one has the
// outcome partial. The node must not be ready, because rules could not be put back. It returns
// the newest record.
func (n *Node) PartlyHealed(records int) scenario.Record {
	n.Helper()
	var newest scenario.Record
	n.Until(fmt.Sprintf("%d flushes, the last repaired in part", records), func() error {
		s := n.Status()
		if len(s.Flushes) < records || s.Flushes[0].Outcome != "partial" {
			return fmt.Errorf("%d flush records: %+v", len(s.Flushes), s.Flushes)
		}
		newest = s.Flushes[0]
		if _, err := Fetch("/readyz"); err == nil || !strings.Contains(err.Error(), "could not be put back") {
			return fmt.Errorf("/readyz says %v", err)
		}
		return nil
	})
	return newest
}

// Until waits until done returns nil, and returns how long that took. Only the test's time
// limits the wait. If the daemon ends unexpectedly, the test fails at once.
func (n *Node) Until(what string, done func() error) time.Duration {
	n.Helper()
	return testkit.Until(n.T, what, n.whileItRuns(what, done))
}

// whileItRuns returns done, but fails the test once the daemon has ended unexpectedly.
func (n *Node) whileItRuns(what string, done func() error) func() error {
	p := n.newest.Load()
	return func() error {
		n.Helper()
		ended := p != nil && p == n.newest.Load() && !p.Running() && !p.asked.Load()
		err := done()
		if err != nil && ended {
			n.Fatalf("canaryd ended with %v while the test waited for %s: %v\n%s", p.Err(), what, err, p.Tail())
		}
		return err
	}
}

// Get requests a path from the daemon over HTTP. A status other than 200 ends the test.
func (n *Node) Get(path string) string {
	n.Helper()
	text, err := Fetch(path)
	n.Must(err)
	return text
}

// Fetch is Get with an error.
func Fetch(path string) (string, error) {
	text, err := canaryd.Get(context.Background(), path)
	return string(text), err
}

// Ready returns nil if the daemon reports every table as intact.
func Ready() error {
	_, err := Fetch("/readyz")
	return err
}

// Stored returns the IDs of the generations on disk.
func (n *Node) Stored() []string {
	n.Helper()
	files, err := filepath.Glob("/run/state/generations/*.json")
	n.Must(err)
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), ".json")
	}
	return files
}
