package main

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A nativeGuard is what guarding native tables takes; its zero value guards none.
type nativeGuard struct {
	config  daemon.NativeConfig
	kernel  *native.Kernel
	watcher *watch.CommitWatcher // nil: the one of the nft backend does
}

// guardNative opens what guards the native tables that --protect names, if it names any.
func (o *options) guardNative(kernel *iptables.Kernel, hints *watch.Hints, writers *watch.Writers) (nativeGuard, error) {
	if !o.selector.Native() {
		return nativeGuard{}, nil
	}
	opened, err := native.OpenKernel(kernel.Port(), kernel.OwnCommit)
	if err != nil {
		return nativeGuard{}, fmt.Errorf("native tables cannot be guarded (leave out the nft: words of --protect): %w", err)
	}
	store, err := daemon.OpenNativeStore(o.stateDir)
	if err != nil {
		_ = opened.Close() // the first error is the one to report
		return nativeGuard{}, err
	}
	g := nativeGuard{kernel: opened, config: daemon.NativeConfig{
		Kernel: opened, Protects: o.selector.ProtectsTable, Writers: writers, Rehearse: (*native.Table).Rehearse, Store: store,
		Cleanup: func() error { return native.RemoveWitnesses(kernel.Port()) },
	}}
	if kernel.Info().Backend == iptables.Legacy {
		// Its writers are holders of the lock: who commits to nf_tables is none of them.
		g.config.Writers = &watch.Writers{}
		g.watcher = &watch.CommitWatcher{Hints: hints, Writers: g.config.Writers,
			Subscribe: func() (watch.CommitSource, error) { return kernel.Subscribe() }}
	}
	return g, nil
}

func (g nativeGuard) close() {
	if g.kernel != nil {
		_ = g.kernel.Close() // nothing is left to do with it
	}
}

func (g nativeGuard) watch(ctx context.Context, group *errgroup.Group) {
	if g.watcher != nil {
		group.Go(func() error { return g.watcher.Run(ctx) })
	}
}
