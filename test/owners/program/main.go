// Flanneld writes the rules of flannel with flannel's own package, as flannel's main does, and runs
// until a signal ends it. It has no subnet manager and no backend: flags have the addresses. Its
// start removes the rules of the other mode, as flannel's does.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/flannel-io/flannel/pkg/ip"
	"github.com/flannel-io/flannel/pkg/lease"
	"github.com/flannel-io/flannel/pkg/trafficmngr"
	"github.com/flannel-io/flannel/pkg/trafficmngr/iptables"
	"github.com/flannel-io/flannel/pkg/trafficmngr/nftables"
)

func main() {
	native := flag.Bool("nftables", false, "flannel's EnableNFTables")
	resync := flag.Int("iptables-resync", 5, "seconds from one look to the next")
	network := flag.String("network", "10.244.0.0/16", "the cluster's pods")
	subnet := flag.String("subnet", "10.244.1.0/24", "the node's pods")
	network6 := flag.String("network6", "fd00:244::/48", "the cluster's pods")
	subnet6 := flag.String("subnet6", "fd00:244:0:1::/64", "the node's pods")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	l := &lease.Lease{EnableIPv4: true, EnableIPv6: true, Subnet: ip.FromIPNet(parsed(*subnet)), IPv6Subnet: ip.FromIP6Net(parsed(*subnet6))}
	of, of6 := ip.FromIPNet(parsed(*network)), ip.FromIP6Net(parsed(*network6))

	var manager, other trafficmngr.TrafficManager = &iptables.IPTablesManager{}, &nftables.NFTablesManager{}
	if *native {
		manager, other = other, manager
	}
	fatal(other.CleanUp(ctx))
	fatal(manager.Init(ctx))
	// The file of an earlier run has the same subnet.
	fatal(manager.SetupAndEnsureMasqRules(ctx, of, l.Subnet, of, of6, l.IPv6Subnet, of6, l, *resync, false))
	manager.SetupAndEnsureForwardRules(ctx, of, of6, *resync)
	fmt.Println("the rules are written")
	<-ctx.Done()
}

func parsed(text string) *net.IPNet {
	_, n, err := net.ParseCIDR(text)
	fatal(err)
	return n
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "flanneld:", err)
		os.Exit(1)
	}
}
