package main

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// openStandby opens what translates while nat rules are missing, if --standby asks for it. The
// caller must call closeIt before it closes the kernel.
func (o *options) openStandby(kernel *iptables.Kernel) (cfg daemon.StandbyConfig, closeIt func(), err error) {
	none := func() {}
	switch {
	case o.standby == "off":
		return daemon.StandbyConfig{Off: "by --standby"}, none, nil
	case kernel.Info().Backend != iptables.NFT:
		return daemon.StandbyConfig{Off: "it copies rules of iptables-nft only"}, none, nil
	}
	opened, err := daemon.OpenStandby(kernel)
	if err != nil {
		return daemon.StandbyConfig{}, nil, fmt.Errorf("the standby (--standby=off does without): %w", err)
	}
	return daemon.StandbyConfig{Table: opened, Auto: o.standby == "auto"}, func() { _ = opened.Close() }, nil
}
