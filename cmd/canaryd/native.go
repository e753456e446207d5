package main

import (
	"context"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// nativeGuard is what guards the native tables that --protect names.
type nativeGuard struct {
	cfg daemon.NativeConfig
	// woken is closed once there is a table to guard; nil: --protect names none.
	woken   chan struct{}
	closeIt func()
}

// guardNative makes what guards the native tables that --protect names. As long as none of them
// stands it hears of no commits. The caller must call closeIt.
func (o *options) guardNative(kernel *iptables.Kernel) (nativeGuard, error) {
	if !o.selector.Native() {
		return nativeGuard{closeIt: func() {}}, nil
	}
	store, err := daemon.OpenNativeStore(o.stateDir)
	if err != nil {
		return nativeGuard{}, err
	}
	late := native.NewLateKernel(kernel.Port(), kernel.OwnCommit)
	g := nativeGuard{woken: make(chan struct{}), closeIt: func() { _ = late.Close() }} // nothing is left to do with it
	awake := false
	g.cfg = daemon.NativeConfig{
		Kernel: late, Protects: o.selector.ProtectsTable, Rehearse: (*native.Table).Rehearse, Store: store,
		Cleanup: func() error { return native.RemoveWitnesses(kernel.Port()) },
		Wake: func(wanted func(nft.Table) bool) (bool, error) {
			is, err := late.Wake(wanted)
			if is && !awake { // only the loop calls this
				awake = true
				close(g.woken)
			}
			return is, err
		},
	}
	return g, nil
}

// restoreNative puts back lost native tables that the last daemon stored.
func (b bench) restoreNative(dry bool) ([]api.NativeRestored, error) {
	if !b.o.selector.Native() {
		return nil, nil
	}
	store, err := daemon.OpenNativeStore(b.o.stateDir)
	if err != nil {
		return nil, err
	}
	kernel := native.NewLateKernel(b.kernel.Port(), b.kernel.OwnCommit)
	defer func() { _ = kernel.Close() }() // nothing is left to do with it
	if _, err := kernel.Wake(nil); err != nil {
		return nil, err
	}
	if kernel.Kernel == nil { // a kernel without nf_tables
		return nil, nil
	}
	return store.RestoreStored(kernel, b.o.selector.ProtectsTable, dry)
}

// strangerTables names the native tables that stand and that --protect does not name.
func (o *options) strangerTables(context.Context) ([]string, error) {
	standing, err := native.AllStanding(func(id tableid.TableID) bool {
		return protect.MayProtectTable(id) && !o.selector.ProtectsTable(id)
	})
	var names []string
	for _, t := range standing {
		names = append(names, t.ID.NFT())
	}
	return names, err
}

// signsOf returns what writers of iptables' tables can be noticed by.
func signsOf(backend iptables.Backend) watch.Signs {
	return watch.Signs{Commits: backend == iptables.NFT, Lock: backend == iptables.Legacy}
}

// watchLate watches for commits from the time when there is a native table to guard. On a node with
// iptables-legacy alone a commit watcher would cost time and find nothing.
func (g nativeGuard) watchLate(ctx context.Context, all watch.Watchers) error {
	select {
	case <-ctx.Done():
		return nil
	case <-g.woken:
		return all.Run(ctx, watch.Signs{Commits: true})
	}
}
