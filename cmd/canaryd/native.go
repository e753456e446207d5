package main

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
)

// guardNative opens what guards the native tables that --protect names; the zero NativeConfig if it
// names none. The caller must call closeIt.
func (o *options) guardNative(kernel *iptables.Kernel) (cfg daemon.NativeConfig, closeIt func(), err error) {
	if !o.selector.Native() {
		return daemon.NativeConfig{}, func() {}, nil
	}
	opened, err := native.OpenKernel(kernel.Port(), kernel.OwnCommit)
	if err != nil {
		return daemon.NativeConfig{}, nil, fmt.Errorf("native tables cannot be guarded (leave out the nft: words of --protect): %w", err)
	}
	closeIt = func() { _ = opened.Close() } // nothing is left to do with it
	store, err := daemon.OpenNativeStore(o.stateDir)
	if err != nil {
		closeIt()
		return daemon.NativeConfig{}, nil, err
	}
	return daemon.NativeConfig{
		Kernel: opened, Protects: o.selector.ProtectsTable, Rehearse: (*native.Table).Rehearse, Store: store,
		Cleanup: func() error { return native.RemoveWitnesses(kernel.Port()) },
	}, closeIt, nil
}
