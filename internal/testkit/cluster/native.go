package cluster

import (
	"fmt"
	"net/netip"
	"strings"
)

// A port is a service in the form of kube-proxy's nftables mode: one port of one protocol.
type port struct {
	name     string
	at       netip.AddrPort
	protocol string
	nodePort uint16 // 0: none
	pods     []netip.Addr
}

// service returns one port of service i.
func (c *Cluster) service(i int, protocol string) port {
	at := Service(i)
	if protocol == "udp" {
		at = Datagrams(at)
	}
	return port{fmt.Sprintf("service-%d-%s", i, protocol), at, protocol, 0, c.endpoints[i]}
}

// ports returns all ports, the same as kube.Objects.
func (c *Cluster) ports() (all []port) {
	for i := range c.endpoints {
		all = append(all, c.service(i, "tcp"))
	}
	for i := range c.DatagramServices() {
		all = append(all, c.service(i, "udp"))
	}
	for _, protocol := range []string{"tcp", "udp"} {
		for i := range NodePorts {
			at := netip.AddrPortFrom(nth("10.97.0.0", i), 80)
			if protocol == "udp" {
				at = Datagrams(at)
			}
			all = append(all, port{fmt.Sprintf("node-port-%d-%s", i, protocol), at, protocol, NodePort(i).Port(), NodePortPods(i)})
		}
		for i := range Hairpins {
			at := Hairpin(i)
			if protocol == "udp" {
				at = Datagrams(at)
			}
			all = append(all, port{fmt.Sprintf("hairpin-%d-%s", i, protocol), at, protocol, 0, []netip.Addr{HairpinPod(i)}})
		}
	}
	return all
}

// rule is the rule of the port's own chain.
func (p port) rule() string {
	to := streams
	if p.protocol == "udp" {
		to = datagrams
	}
	var pods []string
	for i, a := range p.pods {
		pods = append(pods, fmt.Sprintf("%d : %s . %d", i, a, to))
	}
	return fmt.Sprintf("meta l4proto %s dnat ip to numgen random mod %d map { %s }", p.protocol, len(pods), strings.Join(pods, ", "))
}

// Native returns kube-proxy's native table for the services of Rules, in nft's language. It has
// the form of kube-proxy 1.36: a chain and a map for each port, verdict maps of addresses, and
// base chains of its own.
func (c *Cluster) Native() string {
	var ips, addresses, nodePorts, hairpins, chains []string
	for _, p := range c.ports() {
		ips = append(ips, p.at.Addr().String())
		addresses = append(addresses, fmt.Sprintf("%s . %s . %d : goto %s", p.at.Addr(), p.protocol, p.at.Port(), p.name))
		if p.nodePort != 0 {
			nodePorts = append(nodePorts, fmt.Sprintf("%s . %d : goto external-%s", p.protocol, p.nodePort, p.name))
			chains = append(chains, fmt.Sprintf("\tchain external-%s { meta mark set meta mark | 0x4000; goto %s; }\n", p.name, p.name))
		}
		for _, a := range p.pods {
			to := streams
			if p.protocol == "udp" {
				to = datagrams
			}
			hairpins = append(hairpins, fmt.Sprintf("%s . %s . %s . %d", a, a, p.protocol, to))
		}
		chains = append(chains, fmt.Sprintf("\tchain %s { %s; }\n", p.name, p.rule()))
	}
	return strings.NewReplacer("IPS", unique(ips), "ADDRESSES", unique(addresses), "NODEPORTS", unique(nodePorts), "HAIRPINS", unique(hairpins),
		"NODE", node.String(), "CHAINS", strings.Join(chains, "")).Replace(nativeTable)
}

// unique joins the items of the list, each once.
func unique(list []string) string {
	seen, out := map[string]bool{}, []string{}
	for _, one := range list {
		if !seen[one] {
			out = append(out, one)
		}
		seen[one] = true
	}
	return strings.Join(out, ", ")
}

const nativeTable = `table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { IPS }; }
	set nodeport-ips { type ipv4_addr; elements = { NODE }; }
	set hairpin-connections { type ipv4_addr . ipv4_addr . inet_proto . inet_service; elements = { HAIRPINS }; }
	map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict; }
	map firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { ADDRESSES }; }
	map service-nodeports { type inet_proto . inet_service : verdict; elements = { NODEPORTS }; }
	chain filter-prerouting-pre-dnat { type filter hook prerouting priority dstnat - 10; ct state new jump firewall-check; }
	chain filter-forward { type filter hook forward priority filter; ct state new jump service-endpoints-check; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain firewall-check { ip daddr . meta l4proto . th dport vmap @firewall-ips; }
	chain services {
		ip daddr @cluster-ips ip saddr != 10.244.0.0/16 meta mark set meta mark | 0x4000
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
	chain masquerading {
		ip saddr . ip daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade fully-random
	}
CHAINS}
`

// NativeSync returns the text that kube-proxy's nftables mode writes when these services have
// other pods.
func (c *Cluster) NativeSync(changed ...int) string {
	var b strings.Builder
	for _, i := range changed {
		for _, protocol := range []string{"tcp", "udp"} {
			if protocol == "udp" && i >= c.DatagramServices() {
				continue
			}
			p := c.service(i, protocol)
			fmt.Fprintf(&b, "flush chain ip kube-proxy %s\nadd rule ip kube-proxy %s %s\n", p.name, p.name, p.rule())
		}
	}
	return b.String()
}

// HostPortRules returns the rules that the plugin portmap writes into the empty tables of a
// node.
func (c *Cluster) HostPortRules() string { return hostPorts() }
