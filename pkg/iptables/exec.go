package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// maxStdout bounds the output of a child. 62,590 rules are 9 MB.
	maxStdout = 256 << 20
	// maxStderr bounds the stored part of a child's complaints. The rest is read and dropped, so
	// that the child does not block.
	maxStderr = 8 << 10
	// killGrace is the longest wait for the pipes of a killed child.
	killGrace = 2 * time.Second
)

var errTooMuch = errors.New("printed more than 256 MiB")

// A command is one program to execute, never through a shell.
type command struct {
	path    string
	args    []string
	stdin   io.WriterTo // nil for none
	stdout  io.Writer   // gets at most maxStdout bytes; nil to collect them
	timeout time.Duration
	env     []string      // added to our own environment
	started func(pid int) // called with the child's pid; may be nil
}

// A result is the output and exit code of a child that ran to its end. stdout is empty if the
// output went elsewhere.
type result struct {
	stdout, stderr []byte
	exit           int // -1 if it was killed
}

// run executes c and waits for it. A child that ends with an exit code other than 0 is no error.
// run returns an error for a child that cannot be started, that outlives its deadline or the
// context, or that prints more than maxStdout. In these cases it kills the child's process
// group.
//
// It sets LC_ALL=C because classify reads the texts of errors.
func (c command) run(ctx context.Context) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	// Not CommandContext's own kill: restores may have children (modprobe).
	cmd := exec.CommandContext(ctx, c.path, c.args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killGrace
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), c.env...)
	var collected bytes.Buffer
	stdout := &boundedWriter{out: c.stdout, room: maxStdout, onFull: errTooMuch}
	if c.stdout == nil {
		stdout.out = &collected
	}
	var complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = stdout, &boundedWriter{out: &complaints, room: maxStderr}
	err := c.feed(cmd)
	res := result{stdout: collected.Bytes(), stderr: complaints.Bytes(), exit: -1}
	if cmd.ProcessState != nil {
		res.exit = cmd.ProcessState.ExitCode()
	}
	return res, c.failure(ctx, err, res)
}

// feed runs cmd and writes stdin to it meanwhile; run calls it. A child that ends before it has
// read everything is no error: its exit code decides. Wait then closes the pipe, so that the
// writing ends, too, even if another process of the child has it open.
func (c command) feed(cmd *exec.Cmd) error {
	if c.stdin == nil {
		return cmd.Run()
	}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if c.started != nil {
		c.started(cmd.Process.Pid)
	}
	fed := make(chan error, 1)
	go func() {
		_, err := c.stdin.WriteTo(pipe)
		fed <- errors.Join(err, pipe.Close())
	}()
	err = cmd.Wait()
	if feedErr := <-fed; err == nil && !errors.Is(feedErr, syscall.EPIPE) && !errors.Is(feedErr, os.ErrClosed) {
		err = feedErr
	}
	return err
}

// failure turns the error of feed into an error of run, as run documents. It is nil for any
// exit code, and has the reason if the child was killed.
func (c command) failure(ctx context.Context, err error, res result) error {
	name := filepath.Base(c.path)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case context.Cause(ctx) == context.DeadlineExceeded && res.exit == -1:
		return fmt.Errorf("%s was killed: it did not end within %v: %w", name, c.timeout, context.DeadlineExceeded)
	case ctx.Err() != nil && res.exit == -1:
		return fmt.Errorf("%s was killed: %w", name, ctx.Err())
	case errors.As(err, &exit) && res.exit >= 0:
		return nil
	default:
		return fmt.Errorf("%s: %w", name, err)
	}
}

// A boundedWriter passes on as many bytes as it has room for. It drops the rest, or returns
// onFull if that is set.
type boundedWriter struct {
	out    io.Writer
	room   int
	onFull error
}

// Write implements io.Writer. Bytes that it drops count as written, so that the child does not
// block.
func (b *boundedWriter) Write(p []byte) (int, error) {
	n, err := b.out.Write(p[:min(len(p), b.room)])
	b.room -= n
	switch {
	case err != nil:
		return n, err
	case n < len(p) && b.onFull != nil:
		return n, b.onFull
	default:
		return len(p), nil
	}
}
