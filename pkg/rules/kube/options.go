package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A LocalMode is the way in which rules recognise traffic of the node's own pods. The values
// are the values of kube-proxy's --detect-local-mode.
type LocalMode string

// The modes of kube-proxy 1.36.
const (
	ClusterCIDR         LocalMode = "ClusterCIDR"
	NodeCIDR            LocalMode = "NodeCIDR"
	BridgeInterface     LocalMode = "BridgeInterface"
	InterfaceNamePrefix LocalMode = "InterfaceNamePrefix"
)

// Primary is the value of --nodeport-addresses for the node's own addresses.
const Primary = "primary"

// Options describe the node and the way to write its rules. The fields have the names of the
// flags of kube-proxy and kubelet.
type Options struct {
	// Families are the IP families to write; none means both.
	Families []rules.Family
	// HostnameOverride is the name of this node in its Node object and in local endpoints.
	// Empty means the name of the only Node object.
	HostnameOverride string
	// NodeIPs are the node's addresses, at most one of each family. Missing addresses are taken
	// from the Node object.
	NodeIPs []netip.Addr

	MasqueradeAll         bool
	IPTablesMasqueradeBit int
	// ConntrackTCPBeLiberal says that nf_conntrack_tcp_be_liberal is set. kube-proxy then
	// does not drop INVALID packets.
	ConntrackTCPBeLiberal bool
	// RandomFully says that the installed iptables has MASQUERADE --random-fully (1.6.2 and
	// later).
	RandomFully bool

	// DetectLocalMode decides which of the next three fields is used.
	DetectLocalMode        LocalMode
	ClusterCIDRs           []string // none: no local detection
	PodBridgeInterface     string
	PodInterfaceNamePrefix string

	// NodePortAddresses are CIDRs, or Primary alone; none means all.
	NodePortAddresses []string
	// InterfaceAddrs are the addresses of this machine's interfaces. NodePortAddresses selects
	// some of them.
	InterfaceAddrs []netip.Addr
	// IPTablesLocalhostNodePorts has an effect for IPv4 only, as in kube-proxy.
	IPTablesLocalhostNodePorts bool

	// MakeIPTablesUtilChains adds the rules that a kubelet before 1.28 writes.
	MakeIPTablesUtilChains bool
	IPTablesDropBit        int
}

// DefaultOptions returns the defaults of kube-proxy and kubelet. MakeIPTablesUtilChains is off:
// kubelet ignores it since 1.28.
func DefaultOptions() Options {
	return Options{
		IPTablesMasqueradeBit:      14,
		RandomFully:                true,
		DetectLocalMode:            ClusterCIDR,
		IPTablesLocalhostNodePorts: true,
		IPTablesDropBit:            15,
	}
}

// A node is the input of one family's rules, apart from the objects.
type node struct {
	Options
	family     rules.Family
	name       string
	zone       string
	ip         netip.Addr
	local      detector
	everywhere bool         // node ports are open on every address
	nodePorts  []netip.Addr // if not everywhere: node ports are open on these addresses
	localhost  bool         // node ports are open on 127.0.0.0/8
}

// A detector holds the matches that recognise traffic of local pods. All are empty if local
// detection is off.
type detector struct {
	local        string
	notSource    string // iptables prints it before the destination
	notInterface string // iptables prints it behind the destination
}

func (d detector) implemented() bool { return d.local != "" }

// nodes reads the options and the Node object into one node for each family, for Generate.
// The error joins all faulty options, with their flags' names.
func (o Options) nodes(objects Objects) ([]node, error) {
	var bad []error
	refuse := func(flag, format string, args ...any) {
		bad = append(bad, fmt.Errorf("--"+flag+": "+format, args...))
	}
	if o.IPTablesMasqueradeBit < 0 || o.IPTablesMasqueradeBit > 31 {
		refuse("iptables-masquerade-bit", "%d is not within 0 and 31", o.IPTablesMasqueradeBit)
	}
	if o.MakeIPTablesUtilChains {
		switch {
		case o.IPTablesDropBit < 0 || o.IPTablesDropBit > 31:
			refuse("iptables-drop-bit", "%d is not within 0 and 31", o.IPTablesDropBit)
		case o.IPTablesDropBit == o.IPTablesMasqueradeBit:
			refuse("iptables-drop-bit", "%d is the masquerade bit: choose another", o.IPTablesDropBit)
		}
	}

	// component-helpers' GetHostname, which kube-proxy and kubelet share.
	name := strings.ToLower(strings.TrimSpace(o.HostnameOverride))
	if name == "" && len(objects.Nodes) == 1 {
		name = objects.Nodes[0].Name
	}
	if name == "" && len(objects.Nodes) > 1 {
		refuse("hostname-override", "there are %d Node objects: say which of them is this node", len(objects.Nodes))
	}
	self := objects.node(name)
	ips, found := o.nodeIPs(self)
	if !found {
		refuse("node-ip", "%v: give at most one address of each family", o.NodeIPs)
	}
	addresses, err := o.nodePortPrefixes(ips)
	if err != nil {
		refuse("nodeport-addresses", "%w", err)
	}
	detectors, err := o.detectors(self)
	if err != nil {
		bad = append(bad, err)
	}

	families := slices.Sorted(slices.Values(o.Families))
	if len(families) == 0 {
		families = rules.Families()
	}
	var all []node
	for _, f := range slices.Compact(families) {
		n := node{Options: o, family: f, name: name, ip: ips[f], local: detectors[f]}
		if self != nil {
			n.zone = self.Labels[LabelZone]
		}
		n.openNodePorts(addresses)
		all = append(all, n)
	}
	return all, errors.Join(bad...)
}

// detectors returns the local detection of both families, as kube-proxy's getLocalDetectors
// does. A family that is not in the map has none. self is nil without a Node object. A node
// may have several CIDRs of a family, and the first one counts; a cluster may have only one.
func (o Options) detectors(self *Node) (map[rules.Family]detector, error) {
	byCIDR := func(flag string, cidrs []string) (map[rules.Family]detector, error) {
		found := map[rules.Family]detector{}
		for _, text := range cidrs {
			cidr, ok := parseCIDR(text)
			if !ok {
				return nil, fmt.Errorf("%s: %q is not a CIDR", flag, text)
			}
			if _, done := found[familyOf(cidr.Addr())]; done {
				if o.DetectLocalMode != NodeCIDR {
					return nil, fmt.Errorf("%s: %v: give at most one CIDR of each family", flag, cidrs)
				}
				continue
			}
			found[familyOf(cidr.Addr())] = detector{local: " -s " + cidr.String(), notSource: " ! -s " + cidr.String()}
		}
		return found, nil
	}
	byInterface := func(flag, name, suffix string) (map[rules.Family]detector, error) {
		if name == "" || !isInterface(name+suffix) {
			return nil, fmt.Errorf("--%s: %q is not an interface's name", flag, name)
		}
		d := detector{local: " -i " + name + suffix, notInterface: " ! -i " + name + suffix}
		return map[rules.Family]detector{rules.IPv4: d, rules.IPv6: d}, nil
	}
	switch o.DetectLocalMode {
	case ClusterCIDR, "":
		return byCIDR("--cluster-cidr", o.ClusterCIDRs)
	case NodeCIDR:
		// kube-proxy waits for the node's pod CIDRs, and exits if it does not get them.
		if len(podCIDRs(self)) == 0 {
			return nil, fmt.Errorf("--detect-local-mode: NodeCIDR needs a Node object %q with spec.podCIDRs", o.HostnameOverride)
		}
		return byCIDR("Node "+self.Name+": spec.podCIDRs", podCIDRs(self))
	case BridgeInterface:
		return byInterface("pod-bridge-interface", o.PodBridgeInterface, "")
	case InterfaceNamePrefix:
		return byInterface("pod-interface-name-prefix", o.PodInterfaceNamePrefix, "+")
	default:
		return nil, fmt.Errorf("--detect-local-mode: %q is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix", o.DetectLocalMode)
	}
}

// nodeIPs returns the node's address in each family: the options', else the Node object's,
// else loopback (kube-proxy's detectNodeIPs). self is nil without a Node object. False: the
// options name an invalid address, or two of one family.
func (o Options) nodeIPs(self *Node) (map[rules.Family]netip.Addr, bool) {
	ips := map[rules.Family]netip.Addr{
		rules.IPv4: netip.AddrFrom4([4]byte{127, 0, 0, 1}),
		rules.IPv6: netip.IPv6Loopback(),
	}
	for _, ip := range hostIPs(self) {
		ips[familyOf(ip)] = ip
	}
	set := map[rules.Family]bool{}
	for _, ip := range o.NodeIPs {
		ip = ip.Unmap()
		if !ip.IsValid() || set[familyOf(ip)] {
			return ips, false
		}
		ips[familyOf(ip)] = ip
		set[familyOf(ip)] = true
	}
	return ips, true
}

// nodePortPrefixes reads NodePortAddresses, which may be Primary: then it returns the node's
// own addresses, ips. None means all addresses. The error names a text that is no CIDR.
func (o Options) nodePortPrefixes(ips map[rules.Family]netip.Addr) ([]netip.Prefix, error) {
	var all []netip.Prefix
	if slices.Equal(o.NodePortAddresses, []string{Primary}) {
		for _, f := range rules.Families() {
			if !ips[f].IsLoopback() {
				all = append(all, netip.PrefixFrom(ips[f], ips[f].BitLen()))
			}
		}
		return all, nil
	}
	for _, text := range o.NodePortAddresses {
		cidr, ok := parseCIDR(text)
		if !ok {
			return nil, fmt.Errorf("%q is not a CIDR", text)
		}
		all = append(all, cidr)
	}
	return all, nil
}

// openNodePorts sets the addresses on which node ports are open, out of cidrs, as
// kube-proxy's NodePortAddresses does. Without a CIDR of the family, node ports are open on
// all addresses.
func (n *node) openNodePorts(cidrs []netip.Prefix) {
	var mine []netip.Prefix
	for _, cidr := range cidrs {
		if familyOf(cidr.Addr()) == n.family {
			mine = append(mine, cidr)
		}
	}
	n.everywhere = len(mine) == 0 || slices.ContainsFunc(mine, func(c netip.Prefix) bool { return c.Bits() == 0 })
	if n.family == rules.IPv4 && n.IPTablesLocalhostNodePorts {
		n.localhost = n.everywhere || slices.ContainsFunc(mine, func(c netip.Prefix) bool {
			return c.Addr().IsLoopback() || c.Contains(netip.AddrFrom4([4]byte{127, 0, 0, 0}))
		})
	}
	if n.everywhere {
		return
	}
	for _, ip := range n.InterfaceAddrs {
		ip = ip.Unmap().WithZone("")
		chosen := slices.ContainsFunc(mine, func(c netip.Prefix) bool { return c.Contains(ip) })
		if chosen && (!ip.IsLoopback() || n.localhost) {
			n.nodePorts = append(n.nodePorts, ip)
		}
	}
	sorting.Stable(n.nodePorts, netip.Addr.Compare)
	n.nodePorts = slices.Compact(n.nodePorts)
}

// isInterface reports whether iptables accepts the name.
func isInterface(name string) bool {
	return len(name) <= 15 && !strings.ContainsAny(name, " \t\n\"/!") && !strings.HasPrefix(name, "-")
}
