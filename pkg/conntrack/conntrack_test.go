package conntrack_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A seen is one flow as the test makes it and vishvananda/netlink lists it.
type seen struct {
	protocol uint8
	from, to string
	by       string // who answers
}

var families = map[rules.Family]netlink.InetFamily{rules.IPv4: unix.AF_INET, rules.IPv6: unix.AF_INET6}

// make puts a flow into conntrack's table.
func (s seen) make(t *testing.T, f rules.Family) {
	t.Helper()
	from, to, by := netip.MustParseAddrPort(s.from), netip.MustParseAddrPort(s.to), netip.MustParseAddrPort(s.by)
	ip := func(a netip.AddrPort) net.IP { return net.IP(a.Addr().AsSlice()) }
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(families[f]), TimeOut: 600,
		Forward: netlink.IPTuple{Protocol: s.protocol, SrcIP: ip(from), DstIP: ip(to), SrcPort: from.Port(), DstPort: to.Port()},
		Reverse: netlink.IPTuple{Protocol: s.protocol, SrcIP: ip(by), DstIP: ip(from), SrcPort: by.Port(), DstPort: from.Port()},
	}
	if s.protocol == unix.IPPROTO_TCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3} // established
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, families[f], flow); err != nil {
		t.Fatalf("making %v: %v", s, err)
	}
}

// left lists what the table holds. The library reads no ports of SCTP.
func left(t *testing.T, f rules.Family) []string {
	t.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, families[f])
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, flow := range flows {
		all = append(all, fmt.Sprintf("%d %s -> %s:%d", flow.Forward.Protocol, flow.Forward.SrcIP, flow.Forward.DstIP, flow.Forward.DstPort))
	}
	slices.Sort(all)
	return all
}

// TestOnlyUntranslatedFlowsToServicesEnd: of flows that differ in one thing
// each, those go that began untranslated to what ought to be translated.
func TestOnlyUntranslatedFlowsToServicesEnd(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for f, at := range map[rules.Family][]string{
			rules.IPv4: {"192.0.2.%d", "10.96.0.10", "10.244.1.2"},
			rules.IPv6: {"2001:db8::%d", "fd00:96::a", "fd00:244::2"},
		} {
			t.Run(f.String(), func(t *testing.T) {
				from := func(n int) string {
					return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(at[0], n)), 4000).String()
				}
				to := func(i int, port uint16) string {
					return netip.AddrPortFrom(netip.MustParseAddr(at[i]), port).String()
				}
				for _, s := range []seen{
					{rules.UDP, from(1), to(1, 53), to(1, 53)},        // stuck
					{rules.UDP, from(2), to(1, 53), to(2, 53)},        // translated
					{rules.UDP, from(3), to(1, 54), to(1, 54)},        // to another port
					{rules.UDP, from(4), to(2, 53), to(2, 53)},        // to another address
					{rules.SCTP, from(5), to(1, 53), to(1, 53)},       // stuck
					{rules.SCTP, from(6), to(1, 53), to(2, 53)},       // translated
					{unix.IPPROTO_TCP, from(7), to(1, 53), to(1, 53)}, // of no concern
					{rules.UDP, from(8), to(1, 53), to(1, 5353)},      // translated to another port only
					{rules.UDP, to(2, 53), from(9), to(1, 53)},        // somebody else's answer, source translated
				} {
					s.make(t, f)
				}
				service := netip.MustParseAddrPort(to(1, 53))
				deleted, err := conntrack.Kernel{}.DeleteUntranslated(t.Context(), f, func(flow rules.Flow) bool { return flow.Destination == service })
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(conntrack.Deleted{rules.UDP: 1, rules.SCTP: 1}, deleted); diff != "" {
					t.Errorf("deleted (-want +got):\n%s", diff)
				}
				host := func(s string) string { return netip.MustParseAddrPort(s).Addr().String() }
				want := []string{
					fmt.Sprintf("17 %s -> %s:53", host(from(2)), at[1]),
					fmt.Sprintf("17 %s -> %s:54", host(from(3)), at[1]),
					fmt.Sprintf("17 %s -> %s:53", host(from(4)), at[2]),
					fmt.Sprintf("132 %s -> %s:0", host(from(6)), at[1]),
					fmt.Sprintf("6 %s -> %s:53", host(from(7)), at[1]),
					fmt.Sprintf("17 %s -> %s:53", host(from(8)), at[1]),
					fmt.Sprintf("17 %s -> %s:4000", at[2], host(from(9))),
				}
				slices.Sort(want)
				if diff := cmp.Diff(want, left(t, f)); diff != "" {
					t.Errorf("flows left (-want +got):\n%s", diff)
				}
			})
		}
	})
}

// TestNoMoreThanOneSweepsWorth: what is too much is told, and is less the next
// time.
func TestNoMoreThanOneSweepsWorth(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for i := range conntrack.MostDeleted + 5 {
			a := fmt.Sprintf("192.0.%d.%d:4000", i/250, i%250+1)
			seen{rules.UDP, a, "10.96.0.10:53", "10.96.0.10:53"}.make(t, rules.IPv4)
		}
		all := func(rules.Flow) bool { return true }
		deleted, err := conntrack.Kernel{}.DeleteUntranslated(t.Context(), rules.IPv4, all)
		if deleted[rules.UDP] != conntrack.MostDeleted || err == nil {
			t.Errorf("deleted %v, %v; want %d and an error that says that there are more", deleted, err, conntrack.MostDeleted)
		}
		deleted, err = conntrack.Kernel{}.DeleteUntranslated(t.Context(), rules.IPv4, all)
		if deleted[rules.UDP] != 5 || err != nil {
			t.Errorf("then deleted %v, %v; want the other 5", deleted, err)
		}
	})
}

func TestTroubleIsAnError(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		seen{rules.UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.96.0.10:53"}.make(t, rules.IPv4)
		all := func(rules.Flow) bool { return true }
		late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
		defer cancel()
		if _, err := (conntrack.Kernel{}).DeleteUntranslated(late, rules.IPv4, all); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("out of time: %v", err)
		}
		refused := make(chan error)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with its lack of rights
			if err := dropNetAdmin(); err != nil {
				refused <- err
				return
			}
			_, err := conntrack.Kernel{}.DeleteUntranslated(t.Context(), rules.IPv4, all)
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
		nstest.CommandInput(t, "link add bridge0 type bridge\naddr add 172.17.0.1/16 dev bridge0\naddr add fd00:17::1/64 dev bridge0 nodad\nlink set bridge0 up\n",
			"ip", "-batch", "-")
		site, err := conntrack.Kernel{}.Look()
		if err != nil {
			t.Fatal(err)
		}
		for text, want := range map[string]bool{"172.17.0.1": true, "fd00:17::1": true, "127.0.0.7": true, "::1": true, "172.17.0.2": false, "fd00:17::2": false} {
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
		} {
			if got := site.Beyond(test.iface, netip.MustParseAddr(test.address)); got != test.want {
				t.Errorf("%s may be beyond %s: %t, want %t", test.address, test.iface, got, test.want)
			}
		}
	})
}
