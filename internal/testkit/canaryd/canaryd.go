// Package canaryd runs the built program, for tests and measurements, in the namespaces of the
// calling process.
package canaryd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// Address is the address at which canaryd serves HTTP.
const Address = "127.0.0.1:9475"

// Flags returns the arguments of "canaryd run" with all of its files in dir. All other flags keep
// their defaults, as on an operator's node.
func Flags(backend iptables.Backend, dir string) []string {
	return []string{"run", "--backend=" + string(backend), "--state-dir=" + filepath.Join(dir, "state"),
		"--socket=" + Socket(dir), "--metrics-bind-address=" + Address}
}

// Socket returns the path of the control socket that Flags sets.
func Socket(dir string) string { return filepath.Join(dir, "canaryd.sock") }

// A Process is a running canaryd.
type Process struct {
	cmd   *exec.Cmd
	log   string
	ended chan struct{}
	err   error // once ended is closed
}

// Start starts a command that runs canaryd. It appends the output to the file log.
func Start(cmd *exec.Cmd, log string) (*Process, error) {
	file, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the log of canaryd: %w", err)
	}
	defer file.Close()
	cmd.Stdout, cmd.Stderr = file, file
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting canaryd: %w", err)
	}
	p := &Process{cmd: cmd, log: log, ended: make(chan struct{})}
	go func() { p.err = cmd.Wait(); close(p.ended) }()
	return p, nil
}

// PID returns the process ID of canaryd, or of the command that started canaryd.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Args returns the command line.
func (p *Process) Args() []string { return p.cmd.Args }

// Signal sends a signal.
func (p *Process) Signal(s os.Signal) error { return p.cmd.Process.Signal(s) }

// Ended returns a channel that is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Running reports whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Err waits for the end and returns nil if the exit code was 0.
func (p *Process) Err() error {
	<-p.ended
	return p.err
}

// Used waits for the end, and returns the processor time of canaryd and of all programs that it
// executed.
func (p *Process) Used() time.Duration {
	<-p.ended
	return p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// Stop ends canaryd like a service manager, and returns the error of its end. If that takes
// longer than within, Stop kills canaryd and returns an error.
func (p *Process) Stop(within time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stopping canaryd: %w", err)
	}
	select {
	case <-p.ended:
		return p.err
	case <-time.After(within):
		return errors.Join(fmt.Errorf("canaryd did not end within %s of SIGTERM", within), p.Kill())
	}
}

// Kill ends canaryd like the out-of-memory killer, and waits for its end.
func (p *Process) Kill() error {
	if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing canaryd: %w", err)
	}
	<-p.ended
	return nil
}

// Log returns the output so far.
func (p *Process) Log() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Tail returns the last 30 lines of the log.
func (p *Process) Tail() string {
	lines := strings.Split(strings.TrimSpace(p.Log()), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// Get requests a path from the canaryd in this namespace over HTTP. A status other than 200 is
// an error. Get waits until canaryd answers or ends, or the context does.
func Get(ctx context.Context, path string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+Address+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, strings.TrimSpace(string(text)))
	}
	return text, err
}
