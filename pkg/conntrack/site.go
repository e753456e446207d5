package conntrack

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/canaryd/canaryd/pkg/nat"
)

var _ nat.Site = Site{}

// A Site is the node's interfaces and their addresses at one moment.
type Site struct {
	local    map[netip.Addr]bool
	networks map[string][]netip.Prefix // by interface
}

// Look returns the present Site of the network namespace of the process. nat.New needs it for
// rules that match the node's own addresses or an interface.
func (Kernel) Look() (nat.Site, error) {
	site := Site{map[netip.Addr]bool{}, map[string][]netip.Prefix{}}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing the node's interfaces: %w", err)
	}
	for _, i := range interfaces {
		addresses, err := i.Addrs()
		if err != nil {
			continue // the interface is gone, or has lost its last address
		}
		for _, a := range addresses {
			network, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			ip, okIP := netip.AddrFromSlice(network.IP)
			ones, bits := network.Mask.Size()
			if !okIP || bits == 0 {
				continue
			}
			ip = ip.Unmap()
			site.local[ip] = true
			site.networks[i.Name] = append(site.networks[i.Name], netip.PrefixFrom(ip, ones).Masked())
		}
	}
	return site, nil
}

// Local reports whether an address is the node's own, as all of 127.0.0.0/8 is.
func (s Site) Local(a netip.Addr) bool { return a.IsLoopback() || s.local[a] }

// Beyond reports whether the interface has an address in the network of a. If not, a flow from
// a did not come in by it. An interface that does not exist may lead anywhere.
func (s Site) Beyond(iface string, a netip.Addr) bool {
	networks, known := s.networks[iface]
	for _, n := range networks {
		if n.Contains(a) {
			return true
		}
	}
	return !known
}
