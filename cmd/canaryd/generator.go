package main

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/spf13/pflag"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A generator has the flags of the generator of Kubernetes rules. Their names and defaults are
// the same as in kube-proxy and kubelet.
type generator struct {
	kube        kube.Options
	nodeIPs     []string
	randomFully string
}

// generatorFlags returns the flags that describe kube-proxy's configuration for
// --source=manifest.
func generatorFlags() []string {
	return []string{
		"hostname-override", "node-ip", "masquerade-all", "iptables-masquerade-bit", "iptables-drop-bit",
		"make-iptables-util-chains", "detect-local-mode", "cluster-cidr", "pod-bridge-interface",
		"pod-interface-name-prefix", "nodeport-addresses", "iptables-localhost-nodeports",
		"conntrack-tcp-be-liberal", "random-fully",
	}
}

// addTo adds kube-proxy's flags to flags, with kube-proxy's defaults. They fill the generator.
func (g *generator) addTo(flags *pflag.FlagSet) {
	g.kube = kube.DefaultOptions()
	k := &g.kube
	flags.StringVar(&k.HostnameOverride, "hostname-override", "", "this node's name; default the only Node object's")
	flags.StringSliceVar(&g.nodeIPs, "node-ip", nil, "this node's addresses; default the Node object's")
	flags.BoolVar(&k.MasqueradeAll, "masquerade-all", false, "masquerade all traffic to services")
	flags.IntVar(&k.IPTablesMasqueradeBit, "iptables-masquerade-bit", k.IPTablesMasqueradeBit, "bit of the mark to masquerade")
	flags.IntVar(&k.IPTablesDropBit, "iptables-drop-bit", k.IPTablesDropBit, "bit of the mark to drop")
	flags.BoolVar(&k.MakeIPTablesUtilChains, "make-iptables-util-chains", false, "write the rules of kubelets before 1.28")
	flags.StringVar((*string)(&k.DetectLocalMode), "detect-local-mode", string(k.DetectLocalMode), "ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix")
	flags.StringSliceVar(&k.ClusterCIDRs, "cluster-cidr", nil, "CIDRs of the cluster's pods")
	flags.StringVar(&k.PodBridgeInterface, "pod-bridge-interface", "", "the bridge of this node's pods")
	flags.StringVar(&k.PodInterfaceNamePrefix, "pod-interface-name-prefix", "", "prefix of the names of pods' interfaces")
	flags.StringSliceVar(&k.NodePortAddresses, "nodeport-addresses", nil, "CIDRs, or primary, that take node ports")
	flags.BoolVar(&k.IPTablesLocalhostNodePorts, "iptables-localhost-nodeports", k.IPTablesLocalhostNodePorts, "node ports on 127.0.0.1 (IPv4)")
	flags.BoolVar(&k.ConntrackTCPBeLiberal, "conntrack-tcp-be-liberal", false, "do not drop INVALID packets")
	flags.StringVar(&g.randomFully, "random-fully", "auto", "MASQUERADE --random-fully: auto, true, false")
}

// options returns the generator's options for these families, with this machine's addresses.
// randomFully means that the installed iptables has --random-fully, for the value auto.
func (g *generator) options(families []rules.Family, randomFully bool) (kube.Options, error) {
	k := g.kube
	k.Families = families
	for _, text := range g.nodeIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return kube.Options{}, fmt.Errorf("--node-ip is %q: want IP addresses", text)
		}
		k.NodeIPs = append(k.NodeIPs, ip)
	}
	k.RandomFully = g.randomFully == "true" || g.randomFully == "auto" && randomFully
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return kube.Options{}, fmt.Errorf("reading the addresses of this machine's interfaces: %w", err)
	}
	for _, a := range addresses {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			k.InterfaceAddrs = append(k.InterfaceAddrs, prefix.Addr())
		}
	}
	return k, nil
}
