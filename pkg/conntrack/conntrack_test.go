package conntrack_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

var families = map[rules.Family]netlink.InetFamily{rules.IPv4: unix.AF_INET, rules.IPv6: unix.AF_INET6}

// someRules translate flows to some addresses, and masquerade flows from some
// sources to one backend.
type someRules struct {
	services map[netip.AddrPort]bool
	sources  map[netip.Addr]bool
	backend  netip.AddrPort
}

func (r someRules) Translates(f nat.Flow) bool { return r.services[f.Destination] }

func (r someRules) Masquerades(f nat.Flow, backend netip.AddrPort) bool {
	return r.services[f.Destination] && r.sources[f.Source.Addr()] && backend == r.backend
}

// everything translates all flows.
type everything struct{}

func (everything) Translates(nat.Flow) bool                  { return true }
func (everything) Masquerades(nat.Flow, netip.AddrPort) bool { return false }

// udp is a flow that was not translated.
func udp(from string) conntrack.Made {
	return conntrack.Made{Protocol: nat.UDP, From: netip.MustParseAddrPort(from), To: netip.MustParseAddrPort("10.96.0.10:53")}
}

func create(t *testing.T, f rules.Family, flows ...conntrack.Made) {
	t.Helper()
	if err := conntrack.Create(f, flows...); err != nil {
		t.Fatal(err)
	}
}

// left returns the sources of the table's flows.
func left(t *testing.T, f rules.Family) map[netip.Addr]bool {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, families[f])
	if err != nil {
		t.Fatal(err)
	}
	from := map[netip.Addr]bool{}
	for _, flow := range flows {
		a, _ := netip.AddrFromSlice(flow.Forward.SrcIP)
		from[a.Unmap()] = true
	}
	return from
}

// States of TCP (linux/netfilter/nf_conntrack_tcp.h).
const (
	synSent, synReceived, established, synSent2 = 1, 2, 3, 9
)

// TestWhichFlowsEnd: each flow differs in one thing. Sweep must end exactly the
// flows that are certainly stuck, whether or not the kernel filters.
func TestWhichFlowsEnd(t *testing.T) {
	const tcp, udp, sctp = nat.TCP, nat.UDP, nat.SCTP
	const answered, assured = conntrack.SeenReply, conntrack.Assured
	tests := []struct {
		story          string
		protocol       uint8
		to, by         string // "service", "other", "pod", "wrong pod", "other port"
		state          uint8
		status         uint32
		zone           uint16
		masquerade, is bool // the rules masquerade it; it is masqueraded
		ends           bool
	}{
		{story: "UDP that went past the service", protocol: udp, to: "service", by: "service", ends: true},
		{story: "answered by the wrong host", protocol: udp, to: "service", by: "service", status: answered, ends: true},
		{story: "translated", protocol: udp, to: "service", by: "pod"},
		{story: "to a port that is no service", protocol: udp, to: "other port", by: "other port"},
		{story: "to another address", protocol: udp, to: "other", by: "other"},
		{story: "translated to another port only", protocol: udp, to: "service", by: "other port"},
		{story: "in a zone of its own", protocol: udp, to: "service", by: "service", zone: 7},
		{story: "masqueraded past the service", protocol: udp, to: "service", by: "service", is: true, ends: true},
		{story: "SCTP that went past the service", protocol: sctp, to: "service", by: "service", ends: true},
		{story: "an association with the wrong host", protocol: sctp, to: "service", by: "service", status: answered},
		{story: "SCTP that is translated", protocol: sctp, to: "service", by: "pod"},

		{story: "a SYN that went past the service", protocol: tcp, to: "service", by: "service", state: synSent, ends: true},
		{story: "a SYN to another address", protocol: tcp, to: "other", by: "other", state: synSent},
		{story: "a SYN that is translated", protocol: tcp, to: "service", by: "pod", state: synSent},
		{story: "half open with the wrong host", protocol: tcp, to: "service", by: "service", state: synReceived, status: answered},
		{story: "half open, which its state alone says", protocol: tcp, to: "service", by: "service", state: synReceived},
		{story: "an answer, which its status alone says", protocol: tcp, to: "service", by: "service", state: synSent, status: answered},
		{story: "opened from both sides at once", protocol: tcp, to: "service", by: "service", state: synSent2},
		{story: "a connection with the wrong host", protocol: tcp, to: "service", by: "service", state: established, status: answered | assured},
		{story: "a connection picked up in the middle", protocol: tcp, to: "service", by: "service", state: established},

		{story: "a SYN with the wrong source", protocol: tcp, to: "service", by: "pod", state: synSent, masquerade: true, ends: true},
		{story: "with the right one", protocol: tcp, to: "service", by: "pod", state: synSent, masquerade: true, is: true},
		{story: "to a pod that needs none", protocol: tcp, to: "service", by: "wrong pod", state: synSent, masquerade: true},
		{story: "half open with the wrong source", protocol: tcp, to: "service", by: "pod", state: synReceived, status: answered, masquerade: true},
		{story: "a connection with the wrong source", protocol: tcp, to: "service", by: "pod", state: established, status: answered | assured, masquerade: true},
		{story: "UDP with the wrong source", protocol: udp, to: "service", by: "pod", masquerade: true, ends: true},
		{story: "answered all the same", protocol: udp, to: "service", by: "pod", status: answered, masquerade: true},
		{story: "SCTP with the wrong source", protocol: sctp, to: "service", by: "pod", masquerade: true, ends: true},
	}
	nstest.Run(t, func(t *testing.T) {
		for f, net := range map[rules.Family]string{rules.IPv4: "192.0.2.%d", rules.IPv6: "2001:db8::%d"} {
			for name, kernel := range map[string]conntrack.Kernel{"the kernel filters": {}, "it cannot": conntrack.Plain()} {
				t.Run(f.String()+", "+name, func(t *testing.T) {
					address := func(n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf(net, n)) }
					at := map[string]netip.AddrPort{
						"service": netip.AddrPortFrom(address(200), 53), "other port": netip.AddrPortFrom(address(200), 54),
						"other": netip.AddrPortFrom(address(201), 53), "pod": netip.AddrPortFrom(address(202), 5353),
						"wrong pod": netip.AddrPortFrom(address(203), 5353),
					}
					nat := someRules{map[netip.AddrPort]bool{at["service"]: true}, map[netip.Addr]bool{}, at["pod"]}
					var want, wantLeft []string
					counts := conntrack.Deleted{ByProtocol: map[uint8]int{}}
					for i, test := range tests {
						made := conntrack.Made{
							Protocol: test.protocol, From: netip.AddrPortFrom(address(i+1), 4000), To: at[test.to], By: at[test.by],
							State: test.state, Status: test.status, Zone: test.zone,
						}
						if test.is {
							made.At = netip.AddrPortFrom(address(250), uint16(10000+i))
						}
						nat.sources[address(i+1)] = test.masquerade
						create(t, f, made)
						if !test.ends {
							wantLeft = append(wantLeft, test.story)
							continue
						}
						want = append(want, test.story)
						counts.ByProtocol[test.protocol]++
						if test.by == "pod" {
							counts.Unmasqueraded++
						}
					}
					deleted, err := kernel.Sweep(t.Context(), f, time.Now(), nat)
					if err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(counts, deleted); diff != "" {
						t.Errorf("deleted (-want +got):\n%s", diff)
					}
					var ended, stayed []string
					flows := left(t, f)
					for i, test := range tests {
						if flows[address(i+1)] {
							stayed = append(stayed, test.story)
						} else {
							ended = append(ended, test.story)
						}
					}
					if diff := cmp.Diff(want, ended); diff != "" {
						t.Errorf("ended (-want +got):\n%s", diff)
					}
					if diff := cmp.Diff(wantLeft, stayed); diff != "" {
						t.Errorf("left alone (-want +got):\n%s", diff)
					}
					if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	})
}

// late sends an answer while the sweep runs.
type late struct {
	everything
	answer func()
}

func (l late) Translates(nat.Flow) bool {
	l.answer()
	return true
}

// TestAnAnswerInTheLastMoment: a flow gets its answer between the search and its
// end. It is a connection and must stay; another flow, without an answer, is
// ended.
func TestAnAnswerInTheLastMoment(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		to := netip.MustParseAddrPort("10.96.0.10:53")
		answered := conntrack.Made{Protocol: nat.TCP, From: netip.MustParseAddrPort("192.0.2.1:4000"), To: to, State: synSent}
		silent := conntrack.Made{Protocol: nat.TCP, From: netip.MustParseAddrPort("192.0.2.2:4000"), To: to, State: synSent}
		create(t, rules.IPv4, answered, silent)
		answered.State, answered.Status = synReceived, conntrack.SeenReply
		deleted, err := conntrack.Kernel{}.Sweep(t.Context(), rules.IPv4, time.Time{}, late{answer: func() {
			if err := conntrack.Change(rules.IPv4, answered); err != nil {
				t.Error(err)
			}
		}})
		if diff := cmp.Diff(map[uint8]int{nat.TCP: 1}, deleted.ByProtocol); diff != "" || err != nil {
			t.Errorf("%v, deleted (-want +got):\n%s", err, diff)
		}
		want := map[netip.Addr]bool{answered.From.Addr(): true}
		if diff := cmp.Diff(want, left(t, rules.IPv4), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("left (-want +got):\n%s", diff)
		}
	})
}

// TestFlowsFromBeforeTheLossStay: the kernel records when flows began. Older
// flows lack an answer for another reason, and stay. UDP flows end anyway,
// because nothing else would end them.
func TestFlowsFromBeforeTheLossStay(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedSetting(t, "/proc/sys/net/netfilter/nf_conntrack_timestamp", "1")
		to := netip.MustParseAddrPort("10.96.0.10:53")
		create(t, rules.IPv4,
			conntrack.Made{Protocol: nat.TCP, From: netip.MustParseAddrPort("192.0.2.1:4000"), To: to, State: synSent},
			conntrack.Made{Protocol: nat.SCTP, From: netip.MustParseAddrPort("192.0.2.2:4000"), To: to},
			conntrack.Made{Protocol: nat.UDP, From: netip.MustParseAddrPort("192.0.2.3:4000"), To: to})
		for _, test := range []struct {
			story string
			since time.Time
			want  map[uint8]int
		}{
			{"the loss came an hour later", time.Now().Add(time.Hour), map[uint8]int{nat.UDP: 1}},
			{"the loss came before", time.Now().Add(-time.Minute), map[uint8]int{nat.TCP: 1, nat.SCTP: 1}},
		} {
			deleted, err := conntrack.Kernel{}.Sweep(t.Context(), rules.IPv4, test.since, everything{})
			if diff := cmp.Diff(test.want, deleted.ByProtocol); diff != "" || err != nil {
				t.Errorf("%s: %v, deleted (-want +got):\n%s", test.story, err, diff)
			}
		}
	})
}

// TestNoMoreThanOneSweepsWorth: an error gives the number of flows that are left
// for the next sweep.
func TestNoMoreThanOneSweepsWorth(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for i := range conntrack.MaxDeleted + 5 {
			create(t, rules.IPv4, udp(fmt.Sprintf("192.0.%d.%d:4000", i/250, i%250+1)))
		}
		for _, want := range []struct {
			deleted int
			all     bool
		}{{conntrack.MaxDeleted, false}, {5, true}} {
			deleted, err := conntrack.Kernel{}.Sweep(t.Context(), rules.IPv4, time.Time{}, everything{})
			if deleted.ByProtocol[nat.UDP] != want.deleted || (err == nil) != want.all {
				t.Errorf("deleted %v, %v; want %d, and an error if there are more", deleted, err, want.deleted)
			}
		}
	})
}

func TestTroubleIsAnError(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		create(t, rules.IPv4, udp("192.0.2.1:4000"))
		late, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := (conntrack.Kernel{}).Sweep(late, rules.IPv4, time.Time{}, everything{}); !errors.Is(err, context.Canceled) {
			t.Errorf("out of time: %v", err)
		}
		refused := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends without its rights
			if err := dropNetAdmin(); err != nil {
				refused <- err
				return
			}
			_, err := conntrack.Kernel{}.Sweep(t.Context(), rules.IPv4, time.Time{}, everything{})
			refused <- err
		}()
		if err := <-refused; !errors.Is(err, os.ErrPermission) {
			t.Errorf("without CAP_NET_ADMIN: %v", err)
		}
		if n := len(left(t, rules.IPv4)); n != 1 {
			t.Errorf("%d flows left, want the one", n)
		}
	})
}

// dropNetAdmin takes the capability from the calling thread.
func dropNetAdmin() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	data[0].Permitted &^= 1 << unix.CAP_NET_ADMIN
	return unix.Capset(&header, &data[0])
}

func TestSite(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "ip")
		nstest.CommandInput(t, `link add bridge0 type bridge
link add uplink0 type bridge
link add other0 type bridge
link add bare0 type bridge
addr add 172.17.0.1/16 dev bridge0
addr add fd00:17::1/64 dev bridge0 nodad
addr add 192.0.2.1/24 dev uplink0
addr add 2001:db8::1/64 dev uplink0 nodad
addr add 198.18.0.1/24 dev other0
link set bridge0 up
link set uplink0 up
link set other0 up
link set bare0 up
route add 10.8.0.0/24 via 172.17.0.3
route add default via 192.0.2.254 table 7
route add 10.9.0.0/24 nexthop via 192.0.2.9 nexthop via 198.18.0.9
route add local 10.10.0.0/16 dev lo
route add 10.11.0.0/24 dev bare0
route add fd00:8::/64 via fd00:17::3
`, "ip", "-batch", "-")
		site, err := conntrack.Kernel{}.Look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range map[string]bool{"172.17.0.1": true, "fd00:17::1": true, "127.0.0.7": true, "::1": true, "172.17.0.2": false, "fd00:17::2": false,
			"10.10.7.7": true, "10.8.0.1": false, "172.17.255.255": false} {
			if got := site.Local(netip.MustParseAddr(text)); got != want {
				t.Errorf("%s is the node's own: %t, want %t", text, got, want)
			}
		}
		for _, test := range []struct {
			iface, address string
			want           bool
		}{
			{"bridge0", "172.17.200.3", true}, {"bridge0", "fd00:17::3", true}, {"bridge0", "172.18.0.3", false}, {"lo", "172.17.200.3", false},
			{"gone0", "172.17.200.3", true},
			// The networks behind routes: through a container, of another table, by two ways.
			{"bridge0", "10.8.0.5", true}, {"bridge0", "fd00:8::5", true}, {"bridge0", "198.51.100.7", false},
			{"uplink0", "198.51.100.7", true}, {"uplink0", "172.17.200.3", true}, {"uplink0", "fd00:8::5", false}, {"uplink0", "fe80::5", true},
			{"other0", "10.9.0.5", true}, {"other0", "10.8.0.5", false},
			{"bare0", "198.51.100.7", true}, // without an address
			{"other0", "fd00:8::5", true},   // without an IPv6 address
		} {
			if got := site.Beyond(test.iface, netip.MustParseAddr(test.address)); got != test.want {
				t.Errorf("%s may be beyond %s: %t, want %t", test.address, test.iface, got, test.want)
			}
		}
	})
}
