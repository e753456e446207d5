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
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/internal/testkit/canaryd"
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

// A node is this namespace with a canaryd that guards its tables.
type node struct {
	*canaryd.Process
	dir     string
	program string
	backend iptables.Backend
	client  control.Client
}

// start starts canaryd with default flags, except for paths, and waits until it has learned the
// rules and is idle.
func start(ctx context.Context, program, dir string, backend iptables.Backend) (*node, error) {
	n := &node{dir: dir, program: program, backend: backend, client: control.Client{Socket: canaryd.Socket(dir)}}
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
	flags := append(canaryd.Flags(n.backend, n.dir), "--lock-file="+lockFile)
	var err error
	n.Process, err = canaryd.Start(exec.CommandContext(ctx, n.program, flags...), filepath.Join(n.dir, "log"))
	return err
}

// again restarts the daemon, and returns its flush records once it is idle.
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

func (n *node) stop() error { return n.Stop(stopsIn) }

// settle waits until all rules are in force and captured. Unless last is nil, it also waits for
// a closed flush record that is not in last. It returns all records, newest first, and never
// nil.
func (n *node) settle(ctx context.Context, last []api.Flush) ([]api.Flush, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settled, fmt.Errorf("not within %s", settled))
	defer cancel()
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		select {
		case <-n.Ended():
			return nil, fmt.Errorf("canaryd ended (%w):\n%s", n.Err(), n.Tail())
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for canaryd to have everything in force: %w\n%s", context.Cause(ctx), n.Tail())
		case <-ticker.C:
		}
		status, err := n.client.Status(ctx)
		if err != nil && !errors.Is(err, control.ErrNoDaemon) && ctx.Err() == nil {
			return nil, err
		}
		if err != nil || !status.Healthy || status.Generation.Rules == 0 || !status.LearningPendingSince.IsZero() || !status.LossSince.IsZero() {
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
