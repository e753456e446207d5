package main

import (
	"fmt"
	"os"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/cgroup"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/watch"
)

// openStandby opens the standby, which translates while nat rules are missing, if --standby
// requests it. With auto, a failure only turns it off, and cfg says why. The caller must call
// closeIt before it closes the kernel.
func (o *options) openStandby(kernel *iptables.Kernel, hints *watch.Hints) (cfg daemon.StandbyConfig, closeIt func(), err error) {
	none := func() {}
	legacy := kernel.Info().Backend != iptables.NFT
	cfg = daemon.StandbyConfig{Auto: o.standby == "auto"}
	switch {
	case o.standby == "off":
		return daemon.StandbyConfig{Off: "by --standby"}, none, nil
	case legacy:
		cfg.Off = "it copies rules of iptables-nft only"
		if !o.selector.Native() {
			return cfg, none, nil
		}
	}
	missed := func() { hints.Give(watch.SourceMiss) }
	if legacy { // copies of native tables have no misses
		missed = nil
	}
	opened, err := copies.OpenNFT(kernel, room, missed)
	switch {
	case err != nil && legacy: // such a kernel may have no nf_tables
		cfg.NativeOff = err.Error()
		return cfg, none, nil
	case err != nil && cfg.Auto: // it was not requested
		severity.Notices(klog.Background()).Info("There is no standby: its sockets could not be opened; nothing else depends on it", "reason", err)
		cfg.Off, cfg.NativeOff = err.Error(), err.Error()
		return cfg, none, nil
	case err != nil:
		return daemon.StandbyConfig{}, nil, fmt.Errorf("the standby (--standby=off does without): %w", err)
	}
	cfg.Table = opened
	return cfg, func() { _ = opened.Close() }, nil
}

// room returns how much memory the control group still allows. A limit that cannot be read
// counts as none; keepWithinGroup has logged it.
func room() int64 {
	free, _ := cgroup.Room(os.DirFS("/"))
	return free
}
