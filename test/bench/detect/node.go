package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/control"

	"github.com/canaryd/canaryd/internal/api"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

const (
	lockFile = "/run/xtables.lock" // in a /run of this namespace's own
	settled  = 2 * time.Minute     // from start, or a flush, to everything in force
	stopsIn  = 30 * time.Second
	askEvery = 20 * time.Millisecond
)

// A node is this namespace with a built canaryd that guards its tables.
type node struct {
	dir     string
	program string
	backend iptables.Backend
	cmd     *exec.Cmd
	ended   chan error
	client  control.Client
}

// start starts canaryd with the flags' defaults, but for the paths, and waits
// until it has learned the rules and has nothing left to do.
func start(ctx context.Context, program, dir string, backend iptables.Backend) (*node, error) {
	n := &node{dir: dir, program: program, backend: backend, client: control.Client{Socket: filepath.Join(dir, "socket")}}
	if err := n.launch(ctx); err != nil {
		return nil, err
	}
	if _, err := n.settle(ctx, nil); err != nil {
		return nil, errors.Join(err, n.stop())
	}
	return n, nil
}

// launch starts the daemon's process.
func (n *node) launch(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	n.ended = make(chan error, 1)
	n.cmd = exec.CommandContext(ctx, n.program, "run", "--backend="+string(n.backend), "--lock-file="+lockFile,
		"--state-dir="+n.state(), "--socket="+n.client.Socket, "--metrics-bind-address=127.0.0.1:9475")
	n.cmd.Stdout, n.cmd.Stderr = log, log
	if err := n.cmd.Start(); err != nil {
		return err
	}
	go func(ended chan<- error, cmd *exec.Cmd) { ended <- cmd.Wait() }(n.ended, n.cmd)
	return nil
}

// again ends the daemon and starts it anew, and returns its flush records once
// it has nothing left to do.
func (n *node) again(ctx context.Context) ([]api.Flush, error) {
	if err := n.stop(); err != nil {
		return nil, err
	}
	if err := n.launch(ctx); err != nil {
		return nil, err
	}
	return n.settle(ctx, nil)
}

func (n *node) state() string { return filepath.Join(n.dir, "state") }

// pid is the daemon's.
func (n *node) pid() int { return n.cmd.Process.Pid }

func (n *node) stop() error {
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-n.ended:
		return err
	case <-time.After(stopsIn):
		return errors.Join(fmt.Errorf("canaryd did not end within %s of SIGTERM", stopsIn), n.cmd.Process.Kill(), <-n.ended)
	}
}

// settle waits until all is in force, nothing is left to capture, and there
// is a closed flush record that is not among last, unless last is nil. It
// returns all records, newest first, and never nil.
func (n *node) settle(ctx context.Context, last []api.Flush) ([]api.Flush, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settled, fmt.Errorf("not within %s", settled))
	defer cancel()
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		select {
		case err := <-n.ended:
			n.ended <- err
			return nil, fmt.Errorf("canaryd ended (%w):\n%s", err, n.log())
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for canaryd to have everything in force: %w\n%s", context.Cause(ctx), n.log())
		case <-ticker.C:
		}
		status, err := n.client.Status(ctx)
		if err != nil && !errors.Is(err, control.ErrNoDaemon) && ctx.Err() == nil {
			return nil, err
		}
		if err != nil || !status.Healthy || status.Generation.Rules == 0 || !status.CapturePendingSince.IsZero() || !status.LossSince.IsZero() {
			continue
		}
		fresh := after(status.Flushes, last)
		open := slices.ContainsFunc(fresh, func(f api.Flush) bool { return f.Outcome == api.Pending })
		if last == nil || len(fresh) > 0 && !open {
			return append([]api.Flush{}, status.Flushes...), nil
		}
	}
}

// marks returns the marks that the daemon has planted, from its state file.
func (n *node) marks() (canary.Marks, error) {
	text, err := os.ReadFile(filepath.Join(n.state(), "state.json"))
	if err != nil {
		return nil, err
	}
	var state reload.State
	return state.Marks, json.Unmarshal(text, &state)
}

// log returns the end of the daemon's log.
func (n *node) log() string {
	text, err := os.ReadFile(filepath.Join(n.dir, "log"))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
