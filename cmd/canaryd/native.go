package main

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A nativeGuard has the parts that guard the native tables that --protect names.
type nativeGuard struct {
	cfg daemon.NativeConfig
	// woken is closed once there is a table to guard; nil: --protect names none.
	woken   chan struct{}
	closeIt func()
}

// guardNative makes a nativeGuard for the daemon; without native tables in --protect it guards
// none. As long as none of its tables exists it hears of no commits. The caller must call
// closeIt.
func (o *options) guardNative(kernel *iptables.Kernel) (nativeGuard, error) {
	removeDrills := func() error { return native.RemoveDrills(kernel.Port()) } // an earlier run may have guarded others
	if !o.selector.Native() {
		return nativeGuard{cfg: daemon.NativeConfig{RemoveDrills: removeDrills}, closeIt: func() {}}, nil
	}
	store, err := nativestore.Open(o.stateDir)
	if err != nil {
		return nativeGuard{}, err
	}
	late := native.NewLateKernel(kernel.Port(), kernel.OwnCommit, kernel.Muted, o.maxRules)
	g := nativeGuard{woken: make(chan struct{}), closeIt: func() { _ = late.Close() }} // nothing is left to do with it
	wake := sync.OnceFunc(func() { close(g.woken) })
	g.cfg = daemon.NativeConfig{
		Kernel: late, Protects: o.selector.ProtectsTable, Named: o.selector.NamedTables(), Rehearse: (*native.Table).Rehearse, Store: store,
		Cleanup: func() error { return native.RemoveWitnesses(kernel.Port()) }, RemoveDrills: removeDrills,
		Wake: func(wanted func(nft.Table) bool) (bool, error) {
			is, err := late.Wake(wanted)
			if is {
				wake()
			}
			return is, err
		},
	}
	return g, nil
}

// restoreNative puts back lost native tables that the last daemon stored, for a restore without
// a daemon. With dry it only lists them, with the rules that base lacks.
func (b bench) restoreNative(dry bool, base *baseline.Base) ([]api.NativeRestored, error) {
	if !b.o.selector.Native() {
		return nil, nil
	}
	return withNative(b, func(kernel daemon.NativeKernel, store *nativestore.Store) ([]api.NativeRestored, error) {
		return store.RestoreStored(kernel, b.o.selector.ProtectsTable, dry, base)
	})
}

// checkNative judges the native tables that the last daemon stored, and returns their parts in
// quarantine. A table that cannot be
// judged is unknown.
func (b bench) checkNative() (rows []api.NativeTable, parts []api.Quarantined) {
	if !b.o.selector.Native() {
		return nil, nil
	}
	rows, err := withNative(b, func(kernel daemon.NativeKernel, store *nativestore.Store) (rows []api.NativeTable, err error) {
		rows, parts, err = store.CheckStored(kernel, b.o.selector.ProtectsTable)
		return rows, err
	})
	if err != nil {
		return []api.NativeTable{{Table: "native tables", Verdict: canary.Unknown, Why: err.Error()}}, nil
	}
	return rows, parts
}

// returnNative restores a stored generation of a native table. found is false if no generation
// has that ID. A preview marks the rules that base lacks.
func (b bench) returnNative(ctx context.Context, r api.RestoreRequest, base *baseline.Base) (reply api.RestoreReply, found bool, err error) {
	if r.Generation == "" {
		return api.RestoreReply{}, false, nil
	}
	reply, err = withNative(b, func(kernel daemon.NativeKernel, store *nativestore.Store) (reply api.RestoreReply, err error) {
		reply, found, err = store.RestoreGeneration(ctx, kernel, b.o.selector.ProtectsTable, r, base)
		return reply, err
	})
	if err == nil && found && !r.DryRun && reply.Refused == "" && reply.Proved() { // like the daemon, it decides about the broken file
		err = b.dropUnread(func(u reload.Unread) bool {
			return u.Native && slices.ContainsFunc(reply.Native, func(t api.NativeRestored) bool { return u.Table == t.Table })
		})
	}
	return reply, found, err
}

// withNative calls do with native tables and the last daemon's stored content, without a
// daemon. do's kernel is nil without nf_tables.
func withNative[T any](b bench, do func(daemon.NativeKernel, *nativestore.Store) (T, error)) (none T, err error) {
	store, err := nativestore.Open(b.o.stateDir)
	if err != nil {
		return none, err
	}
	kernel := native.NewLateKernel(b.kernel.Port(), b.kernel.OwnCommit, nil, b.o.maxRules)
	defer func() { _ = kernel.Close() }() // nothing is left to do with it
	if _, err := kernel.Wake(nil); err != nil {
		return none, err
	}
	if kernel.Kernel == nil {
		return do(nil, store)
	}
	return do(kernel, store)
}

// renderNative prints a stored generation of a native table, without a daemon. shown is false
// if no generation has that ID.
func renderNative(o *options, to streams) (shown bool, err error) {
	if o.generation == "" {
		return false, nil
	}
	store, err := nativestore.Open(o.stateDir)
	if err != nil {
		return false, err
	}
	text, err := store.Show(o.generation)
	if errors.Is(err, reload.ErrNothingStored) {
		return false, nil
	}
	if err == nil {
		_, err = io.WriteString(to.out, text)
	}
	return err == nil, err
}

// unguardedTables names the existing native tables that --protect does not name, except tables
// that one process owns, because no other can flush these.
func (o *options) unguardedTables(context.Context) ([]string, error) {
	standing, err := native.AllStanding(func(id tableid.TableID) bool {
		return protect.MayProtectTable(id) && !o.selector.ProtectsTable(id)
	})
	var names []string
	for _, t := range standing {
		if !t.Immune {
			names = append(names, t.ID.NFT())
		}
	}
	return names, err
}

// signsOf returns the signs by which writers of iptables' tables can be noticed.
func signsOf(backend iptables.Backend) watch.Signs {
	return watch.Signs{Commits: backend == iptables.NFT, Lock: backend == iptables.Legacy}
}

// watchLate watches for commits once there is a native table to guard. On a node with only
// iptables-legacy a commit watcher would take time and find nothing.
func (g nativeGuard) watchLate(ctx context.Context, all watch.Watchers) error {
	select {
	case <-ctx.Done():
		return nil
	case <-g.woken:
		return all.Run(ctx, watch.Signs{Commits: true})
	}
}
