package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var _ nat.Site = (*Site)(nil)

// A Site is the node's interfaces, addresses and routes at one moment.
type Site struct {
	local    map[netip.Addr]bool
	networks map[side][]netip.Prefix // of interfaces with an address
	// routed are the networks of routes whose interfaces are not named.
	routed []netip.Prefix
	// locals are the networks whose addresses are all the node's, besides those of local.
	locals []netip.Prefix
	// crowded says that the node has more routes than mostRoutes.
	crowded bool
}

// A side is an interface, as seen by the packets of a family. Link-local addresses do not count.
type side struct {
	iface string
	six   bool
}

// mostRoutes is the number of routes of a family that a Site keeps. Above it any address may be
// behind any interface: each test of an interface compares all. A node of Calico has a route for
// each of its pods and each other node.
const mostRoutes = 4096

// Look returns the present Site of the network namespace of the process. nat.New needs it for
// rules that match the node's own addresses or an interface.
func (Kernel) Look(ctx context.Context) (nat.Site, error) {
	site := &Site{local: map[netip.Addr]bool{}, networks: map[side][]netip.Prefix{}}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing the node's interfaces: %w", err)
	}
	names := map[int]string{}
	for _, i := range interfaces {
		names[i.Index] = i.Name
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
			if !ip.IsLinkLocalUnicast() {
				on := side{i.Name, ip.Is6()}
				site.networks[on] = append(site.networks[on], netip.PrefixFrom(ip, ones).Masked())
			}
		}
	}
	for _, f := range []tableid.Family{tableid.IPv4, tableid.IPv6} {
		if err := site.readRoutes(ctx, f, names); err != nil {
			return nil, fmt.Errorf("reading the node's %s routes: %w", f, err)
		}
	}
	return site, nil
}

// readRoutes adds the routes of a family, of all routing tables. names are the interfaces by
// index.
func (s *Site) readRoutes(ctx context.Context, f tableid.Family, names map[int]string) (err error) {
	conn, err := dial(ctx, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range 3 {
		left := mostRoutes
		err = conn.ask(ctx, f, unix.RTM_GETROUTE, unix.NLM_F_DUMP, nil, func(message []byte) {
			if left--; left < 0 {
				s.crowded = true
			} else {
				s.addRoute(message, names)
			}
		})
		if !errors.Is(err, errInterrupted) {
			break // else routes were changed: it may lack some
		}
	}
	return err
}

// addRoute adds a route, as a message of struct rtmsg and attributes has it.
func (s *Site) addRoute(message []byte, names map[int]string) {
	if len(message) < unix.SizeofRtMsg {
		return
	}
	family, ones, kind := message[0], int(message[1]), message[7]
	to, via := netip.IPv4Unspecified(), []int(nil)
	if family == unix.AF_INET6 {
		to = netip.IPv6Unspecified()
	}
	// A damaged attribute ends the loop; earlier attributes count.
	_ = nft.EachAttr(message[unix.SizeofRtMsg:], func(kind uint16, value []byte) error {
		switch kind {
		case unix.RTA_DST:
			to, _ = netip.AddrFromSlice(value)
		case unix.RTA_OIF:
			if len(value) == 4 {
				via = append(via, int(binary.NativeEndian.Uint32(value)))
			}
		case unix.RTA_MULTIPATH:
			for len(value) >= unix.SizeofRtNexthop {
				via = append(via, int(binary.NativeEndian.Uint32(value[4:])))
				length := (int(binary.NativeEndian.Uint16(value)) + 3) &^ 3 // rtnh_len
				value = value[min(max(length, unix.SizeofRtNexthop), len(value)):]
			}
		}
		return nil
	})
	network, err := to.Prefix(ones)
	switch {
	case err != nil:
	case kind == unix.RTN_LOCAL && network.IsSingleIP():
		s.local[to] = true
	case kind == unix.RTN_LOCAL:
		s.locals = append(s.locals, network)
	case kind == unix.RTN_UNICAST && len(via) == 0:
		s.routed = append(s.routed, network)
	case kind == unix.RTN_UNICAST:
		for _, index := range via {
			if on := (side{names[index], to.Is6()}); s.networks[on] != nil {
				s.networks[on] = append(s.networks[on], network)
			}
		}
	}
}

// Local reports whether an address is the node's own, as all of 127.0.0.0/8 is.
func (s *Site) Local(a netip.Addr) bool { return a.IsLoopback() || s.local[a] || within(s.locals, a) }

// Beyond reports whether a packet from a may have come in by the interface: the interface has an
// address in the network of a, or a route of any table leads through it to a. An interface that
// does not exist or has no address of the family may lead anywhere.
func (s *Site) Beyond(iface string, a netip.Addr) bool {
	networks, known := s.networks[side{iface, a.Is6()}]
	return !known || s.crowded || a.IsLinkLocalUnicast() || within(networks, a) || within(s.routed, a)
}

func within(networks []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) })
}
