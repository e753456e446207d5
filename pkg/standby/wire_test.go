package standby_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A lab is a node with two links. Frames that are written to the other side of "in" arrive from
// outside, and packets beyond the node leave by "out". Conntrack has the fate of each flow.
type lab struct {
	*testing.T
	family tableid.Family
	wire   int // a packet socket on the other side of "in"
	index  int
	mac    net.HardwareAddr // of "in"
	zones  string           // of the flows that were sent last
}

// node has the node's own addresses, on "in".
var node = map[tableid.Family]netip.Addr{tableid.IPv4: netip.MustParseAddr("192.0.2.1"), tableid.IPv6: netip.MustParseAddr("2001:db8::1")}

// newLab makes the links of this namespace.
func newLab(t *testing.T, family tableid.Family) *lab {
	t.Helper()
	nstest.NeedProgram(t, "ip", "nft", "iptables-nft", "ip6tables-nft")
	nstest.CommandInput(t, `link add in type veth peer name wire
link add out type veth peer name sink
link set out arp off
link set in up
link set wire up
link set out up
link set sink up
addr add 192.0.2.1/24 dev in
addr add 2001:db8::1/64 dev in nodad
route add default dev out
route add ::/0 dev out
`, "ip", "-batch", "-")
	for name, value := range map[string]string{
		"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
		"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/in/rp_filter": "0",
		"net/ipv4/conf/all/route_localnet": "1",
	} {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	link, err := net.InterfaceByName("in")
	if err != nil {
		t.Fatal(err)
	}
	wire, err := net.InterfaceByName("wire")
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	// The flow keeps the mark that its first packet has when it leaves.
	nstest.CommandInput(t, fmt.Sprintf(`table %s marks {
	chain leaving { type filter hook postrouting priority 300; ct mark set meta mark; }
	chain arriving { type filter hook input priority 300; ct mark set meta mark; }
}
`, family.NFT()), "nft", "-f", "-")
	// Frames carry no checksum of UDP.
	must(t, os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_checksum", []byte("0"), 0))
	return &lab{T: t, family: family, wire: fd, index: wire.Index, mac: link.HardwareAddr}
}

// A flow is the first packet of a flow.
type flow struct {
	Protocol uint8
	From, To netip.AddrPort
}

// A fate is the result of the rules for a flow.
type fate struct {
	From, To netip.AddrPort // as they are behind the rules
	Mark     uint32
}

// send sends a first packet: over the wire from outside, or from a socket of the node's own.
func (l *lab) send(f flow) {
	l.Helper()
	if f.From.Addr() == node[l.family] || f.From.Addr().IsLoopback() {
		l.sendOut(f)
	} else if err := unix.Sendto(l.wire, l.frame(f), 0, &unix.SockaddrLinklayer{Ifindex: l.index}); err != nil {
		l.Fatal(err)
	}
}

// sendOut sends a datagram of the node's own.
func (l *lab) sendOut(f flow) {
	l.Helper()
	d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(f.From)}
	c, err := d.Dial("udp", f.To.String())
	if err != nil {
		l.Fatal(err)
	}
	_, _ = c.Write([]byte("?")) // the answer that nothing listens may have arrived already
	_ = c.Close()
}

// frame builds a UDP datagram, or a TCP SYN, in an Ethernet frame.
func (l *lab) frame(f flow) []byte {
	var transport []byte
	transport = binary.BigEndian.AppendUint16(transport, f.From.Port())
	transport = binary.BigEndian.AppendUint16(transport, f.To.Port())
	if f.Protocol == unix.IPPROTO_UDP {
		transport = append(transport, 0, 9, 0, 0, '?')
	} else {
		transport = append(transport, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, 2, 16, 0, 0, 0, 0, 0)
	}
	out := append(append([]byte{}, l.mac...), 2, 0, 0, 0, 0, 1)
	if l.family == tableid.IPv6 {
		out = append(out, 0x86, 0xdd, 0x60, 0, 0, 0, 0, byte(len(transport)), f.Protocol, 64)
	} else {
		h := []byte{0x45, 0, 0, byte(20 + len(transport)), 0, 1, 0, 0, 64, f.Protocol, 0, 0}
		h = append(append(h, f.From.Addr().AsSlice()...), f.To.Addr().AsSlice()...)
		sum := uint32(0)
		for i := 0; i < len(h); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(h[i:]))
		}
		binary.BigEndian.PutUint16(h[10:], ^uint16(sum+sum>>16))
		return append(append(append(out, 8, 0), h...), transport...)
	}
	return append(append(append(out, f.From.Addr().AsSlice()...), f.To.Addr().AsSlice()...), transport...)
}

// fates sends flows and returns their fates, without flows that have no entry in conntrack. Each
// flow has a zone of its own, by its source port, so that the ports of other flows do not matter to
// it.
func (l *lab) fates(flows []flow) map[flow]fate {
	l.Helper()
	zones := ""
	for i, f := range flows {
		zones += fmt.Sprintf("%d : %d, ", f.From.Port(), i+1)
	}
	if zones != l.zones {
		l.zones = zones
		nstest.CommandInput(l.T, fmt.Sprintf(`table %[1]s zones {}
delete table %[1]s zones
table %[1]s zones {
	chain arriving { type filter hook prerouting priority -300; ct zone set th sport map { %[2]s }; }
	chain leaving { type filter hook output priority -300; ct zone set th sport map { %[2]s }; }
}
`, l.family.NFT(), zones), "nft", "-f", "-")
	}
	family := netlink.InetFamily(unix.AF_INET)
	if l.family == tableid.IPv6 {
		family = unix.AF_INET6
	}
	must(l, netlink.ConntrackTableFlush(netlink.ConntrackTable))
	for _, f := range flows {
		l.send(f)
	}
	entries, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
	must(l, err)
	sent := map[flow]bool{}
	for _, f := range flows {
		sent[f] = true
	}
	all := map[flow]fate{}
	for _, e := range entries {
		f := flow{e.Forward.Protocol, addrPort(e.Forward.SrcIP, e.Forward.SrcPort), addrPort(e.Forward.DstIP, e.Forward.DstPort)}
		if sent[f] {
			all[f] = fate{addrPort(e.Reverse.DstIP, e.Reverse.DstPort), addrPort(e.Reverse.SrcIP, e.Reverse.SrcPort), e.Mark}
		}
	}
	return all
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}
