package packets

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// expect sends one question over each protocol in over, by default all, and wants
// the same outcome of each. want.By names all places that may answer.
func (n *node) expect(t *testing.T, proved *table, proof, from string, to func(protocol string) netip.AddrPort, want outcome, over ...string) {
	t.Helper()
	if len(over) == 0 {
		over = protocols
	}
	for _, protocol := range over {
		t.Run(proof+"/"+protocol, func(t *testing.T) {
			wait := patience
			if want.End == silent {
				wait = silence
			}
			start := time.Now()
			got, err := n.ask(from, 0, protocol, to(protocol), wait)
			if err != nil {
				t.Fatal(err)
			}
			if slices.Contains(strings.Fields(want.By), got.By) {
				got.By = want.By
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("%s from %s to %s (-want +got):\n%s", protocol, from, to(protocol), diff)
			}
			result := want.End
			if want.End == answered {
				result += " by " + strings.ReplaceAll(want.By, " ", " or ") + ", which sees the source " + want.Seen
			}
			proved.add(proof, protocol, from, to(protocol), result, time.Since(start))
		})
	}
}

// at makes a destination that does not depend on the protocol.
func at(a netip.Addr, port uint16) func(string) netip.AddrPort {
	return func(string) netip.AddrPort { return netip.AddrPortFrom(a, port) }
}

func (n *node) of(t *testing.T, f rules.Family, service string, by way) func(string) netip.AddrPort {
	return func(protocol string) netip.AddrPort { return n.destination(t, f, service, by, protocol) }
}

// TestStrictNode: the policies of INPUT and FORWARD are DROP. The rules must let
// exactly their own traffic through. Then the test deletes one rule after the
// other, and the rule's traffic must stop.
func TestStrictNode(t *testing.T) {
	on(t, func(n *node) {
		o := options()
		o.MakeIPTablesUtilChains = true
		n.load(o)
		for _, f := range rules.Families() {
			for _, port := range []uint16{30105, 30199, 30200} {
				n.listen(here, netip.AddrPortFrom(address(here, f), port))
			}
		}
		n.perFamily("strict", func(t *testing.T, f rules.Family) {
			var proved table
			defer func() { proved.log(t) }()
			self := address(here, f)
			dropped := outcome{End: silent}
			masqueraded, kept := outcome{answered, bothPods, here}, outcome{answered, near, own}

			// Addresses of neighbours are resolved with ICMPv6.
			if f == rules.IPv6 {
				n.iptables(t, f, "-A", "INPUT", "-p", "ipv6-icmp", "-j", "ACCEPT")
			}
			n.expect(t, &proved, "a port of the node is open", client, at(self, 30199), outcome{answered, here, own})
			n.iptables(t, f, "-P", "INPUT", "DROP")
			n.iptables(t, f, "-P", "FORWARD", "DROP")
			n.expect(t, &proved, "INPUT DROP closes it", client, at(self, 30199), dropped)
			n.expect(t, &proved, "the health-check node port stays open for TCP", client, at(self, 30105), outcome{answered, here, own}, "tcp")
			n.expect(t, &proved, "and is closed for UDP", client, at(self, 30105), dropped, "udp")

			n.expect(t, &proved, "FORWARD DROP lets marked traffic through", client, n.of(t, f, "plain", nodePort), masqueraded)
			n.expect(t, &proved, "FORWARD DROP stops unmarked traffic", client, n.of(t, f, "local", nodePort), dropped)
			n.iptables(t, f, "-A", "FORWARD", "-i", "to-client", "-o", "to-near", "-j", "ACCEPT")
			n.expect(t, &proved, "once let in, its answers pass as established", client, n.of(t, f, "local", nodePort), kept)

			n.iptables(t, f, "-D", "KUBE-FORWARD", "2")
			n.expect(t, &proved, "without the mark's rule marked traffic stops", client, n.of(t, f, "unready", clusterIP), dropped)
			n.expect(t, &proved, "and what is let in goes on", client, n.of(t, f, "local", nodePort), kept)
			n.dropsInvalid(t, f, &proved)
			n.iptables(t, f, "-D", "KUBE-FORWARD", "2")
			n.expect(t, &proved, "without the conntrack rule no answer comes back", client, n.of(t, f, "local", nodePort), dropped)

			n.iptables(t, f, "-P", "INPUT", "ACCEPT")
			n.expect(t, &proved, "before it is marked a port answers", client, at(self, 30200), outcome{answered, here, own})
			for _, protocol := range protocols {
				n.iptables(t, f, "-t", "nat", "-I", "PREROUTING", "-p", protocol, "--dport", "30200", "-j", "KUBE-MARK-DROP")
			}
			n.expect(t, &proved, "what KUBE-MARK-DROP marks is dropped", client, at(self, 30200), dropped)
			n.expect(t, &proved, "and nothing else", client, at(self, 30199), outcome{answered, here, own})
		})
	})
}

// dropsInvalid sends a pod one segment without a connection: an answer to a SYN
// that no client sent.
func (n *node) dropsInvalid(t *testing.T, f rules.Family, proved *table) {
	t.Helper()
	count := func() int {
		for line := range strings.Lines(nstest.Command(t, n.program(f), "-w", "5", "-vxnL", "KUBE-FORWARD")) {
			words := strings.Fields(line)
			if len(words) > 2 && words[2] == "DROP" {
				packets, err := strconv.Atoi(words[0])
				if err != nil {
					t.Fatal(err)
				}
				return packets
			}
		}
		t.Fatal("KUBE-FORWARD does not begin with a DROP")
		return 0
	}
	from, to := clientAddress(0, f), address(near, f)
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment, 4000)
	binary.BigEndian.PutUint16(segment[2:], 8080)
	binary.BigEndian.PutUint32(segment[4:], 1)
	binary.BigEndian.PutUint32(segment[8:], 1)
	segment[12], segment[13] = 5<<4, 0x12 // its length; SYN and ACK
	binary.BigEndian.PutUint16(segment[14:], 1000)
	binary.BigEndian.PutUint16(segment[16:], checksum(from, to, segment))
	network := "ip4:tcp"
	if f == rules.IPv6 {
		network = "ip6:tcp"
	}
	before, start := count(), time.Now()
	var err error
	n.in(client, func() {
		var c *net.IPConn
		if c, err = net.DialIP(network, &net.IPAddr{IP: from.AsSlice()}, &net.IPAddr{IP: to.AsSlice()}); err == nil {
			_, err = c.Write(segment)
			_ = c.Close()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	testkit.Until(t, "an INVALID packet to be dropped", func() error {
		if count() == before {
			return errors.New("the DROP counts no more than before")
		}
		return nil
	})
	proved.add("a segment of no connection is dropped as INVALID", "tcp", client, to, "counted by the DROP", took)
}

// checksum returns TCP's checksum.
func checksum(from, to netip.Addr, segment []byte) uint16 {
	pseudo := slices.Concat(from.AsSlice(), to.AsSlice(), []byte{0, 6, 0, byte(len(segment))}, segment)
	var sum uint32
	for i := 0; i < len(pseudo); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(pseudo[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// TestLocalhost: node ports on 127.0.0.1 are open if the option says so, and
// never on ::1. route_localnet opens 127.0.0.0/8 to no neighbour.
func TestLocalhost(t *testing.T) {
	lo := map[rules.Family]netip.Addr{rules.IPv4: netip.AddrFrom4([4]byte{127, 0, 0, 1}), rules.IPv6: netip.IPv6Loopback()}
	on(t, func(n *node) {
		var proved table
		defer func() { proved.log(n.T) }()
		n.load(options())
		n.expect(n.T, &proved, "node port on 127.0.0.1, with the option", here, at(lo[rules.IPv4], 30001), outcome{answered, bothPods, here})
		n.expect(n.T, &proved, "node port on 127.0.0.1, with affinity", here, at(lo[rules.IPv4], 30002), outcome{answered, bothPods, here})
		n.expect(n.T, &proved, "node port on ::1, with the option", here, at(lo[rules.IPv6], 30001), outcome{End: refused})

		// A neighbour may send anything to 127.0.0.1. Here its loopback interface
		// is down, so the packet leaves.
		secret := netip.AddrPortFrom(lo[rules.IPv4], 9000)
		n.listen(here, secret)
		n.sysctls(client, "ipv4/conf/all/route_localnet=1")
		nstest.Command(n.T, "ip", "-n", client, "route", "add", "127.0.0.0/8", "via", address(here, rules.IPv4).String())
		const block = "block incoming localnet connections"
		n.expect(n.T, &proved, "127.0.0.1 is closed to neighbours", client, at(secret.Addr(), secret.Port()), outcome{End: silent})
		if hits(n.T, n.counters()[rules.IPv4], block, "", "DROP") < 2 {
			n.Error("silence, but the rule that blocks localnet has not counted the packets")
		}
		n.iptables(n.T, rules.IPv4, "-F", "KUBE-FIREWALL")
		n.expect(n.T, &proved, "and open without the rule", client, at(secret.Addr(), secret.Port()), outcome{answered, here, own})

		o := options()
		o.IPTablesLocalhostNodePorts = false
		n.load(o)
		n.expect(n.T, &proved, "node port on 127.0.0.1, without the option", here, at(lo[rules.IPv4], 30001), outcome{End: refused})
		n.expect(n.T, &proved, "node port on the node's address, without the option", here, at(address(here, rules.IPv4), 30001), outcome{answered, bothPods, here})
	})
}

// TestOptions shows the effect of other options on packets.
func TestOptions(t *testing.T) {
	on(t, func(n *node) {
		n.perFamily("options", func(t *testing.T, f rules.Family) {
			var proved table
			defer func() { proved.log(t) }()
			alone := n.of(t, f, "alone", clusterIP)
			kept, masqueraded := outcome{answered, near, own}, outcome{answered, near, here}
			with := func(change func(o *kube.Options)) {
				o := options()
				o.Families = []rules.Family{f}
				change(&o)
				n.load(o)
			}

			with(func(o *kube.Options) { o.MasqueradeAll = true })
			n.expect(t, &proved, "masquerade-all masquerades pods too", far, alone, masqueraded)

			with(func(o *kube.Options) { o.ClusterCIDRs = nil })
			n.expect(t, &proved, "no local detection: outside keeps its source", client, alone, kept)
			n.expect(t, &proved, "no local detection: a pod keeps its source", far, alone, kept)
			n.expect(t, &proved, "no local detection: a pod that asks itself does not", near, alone, masqueraded)

			for name, change := range map[string]func(o *kube.Options){
				"bridge interface": func(o *kube.Options) {
					o.DetectLocalMode, o.PodBridgeInterface = kube.BridgeInterface, "to-far"
				},
				"interface prefix": func(o *kube.Options) {
					o.DetectLocalMode, o.PodInterfaceNamePrefix = kube.InterfaceNamePrefix, "to-f"
				},
			} {
				with(change)
				n.expect(t, &proved, name+": a pod keeps its source", far, alone, kept)
				n.expect(t, &proved, name+": outside is masqueraded", client, alone, masqueraded)
				n.expect(t, &proved, name+": the node is masqueraded", here, alone, masqueraded)
			}

			with(func(o *kube.Options) { o.IPTablesMasqueradeBit = 0; o.RandomFully = false })
			n.expect(t, &proved, "another masquerade bit", client, alone, masqueraded)

			with(func(o *kube.Options) {
				o.NodePortAddresses = []string{"192.0.2.0/24", "2001:db8:1::/64"}
				o.InterfaceAddrs = []netip.Addr{address(here, f), gateway(near, f), gateway(far, f)}
			})
			n.expect(t, &proved, "node port on a chosen address", client, n.of(t, f, "plain", nodePort), outcome{answered, bothPods, here})
			n.expect(t, &proved, "node port on another address", client, at(gateway(near, f), 30001), outcome{End: refused})
		})
	})
}
