package packets

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

// severalSYNs is enough time for two repetitions of a SYN: after 1 s and after 2
// or 3 s.
const severalSYNs = 4 * time.Second

// A knock is a TCP connection in the making: one socket, and all SYNs that the
// kernel sends for it.
type knock struct {
	fd       int
	from, to netip.AddrPort
}

// knock begins a connection at a place, from an address there if one is given.
func (l *lab) knock(place string, from netip.Addr, to netip.AddrPort) *knock {
	l.Helper()
	k := &knock{to: to}
	l.Must(l.In(place, func() error {
		var err error
		k.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if from.IsValid() {
			if err := unix.Bind(k.fd, &unix.SockaddrInet4{Addr: from.As4()}); err != nil {
				return err
			}
		}
		if err := unix.Connect(k.fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != unix.EINPROGRESS {
			return err
		}
		name, err := unix.Getsockname(k.fd)
		if at, ok := name.(*unix.SockaddrInet4); ok {
			k.from = netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
		}
		return err
	}))
	l.Cleanup(func() { _ = unix.Close(k.fd) })
	return k
}

// opened reports whether the connection is made.
func (l *lab) opened(k *knock) bool {
	l.Helper()
	ready := []unix.PollFd{{Fd: int32(k.fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(ready, 10)
	if err == unix.EINTR || n == 0 {
		return false
	}
	l.Must(err)
	failed, err := unix.GetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	l.Must(err)
	if failed != 0 {
		l.Fatalf("%s to %s: %v", k.from, k.to, unix.Errno(failed))
	}
	return true
}

func (l *lab) wantOpened(what string, k *knock) {
	l.Helper()
	testkit.Until(l, "the connection of the outage, "+what, func() error {
		if !l.opened(k) {
			return errors.New("it is not made")
		}
		return nil
	})
}

func (l *lab) wantStuck(what string, k *knock, limit time.Duration) {
	l.Helper()
	testkit.Stays(l, limit, "that no connection is made, "+what, func() error {
		if l.opened(k) {
			return errors.New("it is made: nothing would be shown")
		}
		return nil
	})
}

// entry returns conntrack's entry of a connection, nil if there is none.
func (l *lab) entry(k *knock) *netlink.ConntrackFlow {
	l.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	l.Must(err)
	for _, f := range flows {
		if f.Forward.SrcPort == k.from.Port() && f.Forward.DstPort == k.to.Port() &&
			f.Forward.SrcIP.String() == k.from.Addr().String() && f.Forward.DstIP.String() == k.to.Addr().String() {
			return f
		}
	}
	return nil
}

// hairpins begin connections whose destination is their own source. One is to a
// service from its only pod, and one to a host port. Without a masquerade the
// pods answer themselves, past the node.
func (l *lab) hairpins() []*knock {
	l.Helper()
	all := []*knock{
		l.knock(cluster.Pods, l.Endpoints(lonely)[0], cluster.Service(lonely)),
		l.knock(cluster.Pods, cluster.HostPod(0), cluster.HostPort(0)),
	}
	for _, k := range all {
		l.wantStuck("without a masquerade", k, silentFor)
		if e := l.entry(k); e == nil || e.Reverse.SrcIP.String() != k.from.Addr().String() {
			l.Fatalf("the connection to %s is not sent to where it comes from: %v", k.to, e)
		}
	}
	return all
}

func (l *lab) flushPostrouting() {
	l.Helper()
	l.Must(l.Programs.Flush(l.Context(), rules.IPv4, rules.Nat, "POSTROUTING"))
}

// TestWithoutCanarydASYNOfTheOutageStaysUnheard shows why canaryd must act on
// TCP. The owner has put the rules back. A connection in the making still fails,
// however often its SYN is sent again, but a new connection succeeds.
func TestWithoutCanarydASYNOfTheOutageStaysUnheard(t *testing.T) {
	inCluster(t, func(l *lab) {
		l.flushNat()
		meanwhile := l.knock(cluster.Client, netip.Addr{}, cluster.Service(0))
		l.wantStuck("during the outage", meanwhile, silentFor)
		l.Until("the kernel to keep its flow", func() error {
			if l.entry(meanwhile) == nil {
				return errors.New("it has no entry")
			}
			return nil
		})
		l.putBack()
		l.flushPostrouting()
		hairpins := l.hairpins()
		l.putBack()
		l.wantOpened("a new one", l.knock(cluster.Client, netip.Addr{}, cluster.Service(0)))
		l.wantStuck("the one of the outage", meanwhile, severalSYNs)
		for _, k := range hairpins { // these had the same time
			l.wantStuck("a hairpin of the outage", k, time.Millisecond)
		}
	})
}

// TestConnectionsThroughAFlush: connections in the making during the outage must
// succeed after the replay, with the sockets that began them. Flows that any host
// answered, and flows to another address, must stay unchanged.
func TestConnectionsThroughAFlush(t *testing.T) {
	inCluster(t, func(l *lab) {
		// A process that may not set it tests less: then flows of any age are
		// ended.
		if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_timestamp", []byte("1"), 0); err != nil {
			l.Log("the kernel does not note when flows begin:", err)
		}
		d := l.Start()
		before := []*stream{l.stream(cluster.Service(0)), l.stream(cluster.HostPort(0))}

		d.Suspend() // extends the outage for as long as the test needs
		l.flushNat()
		var gap []*knock
		for i := range 3 {
			gap = append(gap, l.knock(cluster.Client, netip.Addr{}, cluster.Service(i)))
		}
		gap = append(gap, l.knock("", netip.Addr{}, cluster.Service(1))) // the node itself
		stranger := l.knock(cluster.Client, netip.Addr{}, cluster.Stranger)
		other := l.knock(cluster.Client, netip.Addr{}, netip.AddrPortFrom(cluster.Service(2).Addr(), 81)) // no port of the service
		half := l.halfOpen(cluster.Service(2))
		for _, k := range append(gap, stranger, other) {
			l.wantStuck("during the outage", k, silentFor/4)
			if l.entry(k) == nil {
				l.Fatalf("conntrack does not know the flow to %s: nothing would be shown", k.to)
			}
		}
		l.wantAlive("during the outage", before...)
		d.Signal(syscall.SIGCONT)
		l.Healed(1)

		for _, k := range gap {
			l.wantOpened("after the replay", k)
		}
		l.wantAlive("after the replay", before...)
		for what, k := range map[string]*knock{"the stranger": stranger, "another port of a service": other, "one that was answered": half} {
			if l.entry(k) == nil {
				l.Errorf("the flow to %s is gone from conntrack", what)
			}
		}
		l.wantEnded(len(gap))
		d.WantLog("Ended flows that began while the rules were missing", "tcp=4", "unmasqueraded=0")
	})
}

// TestHairpinsThroughALossOfPostrouting: only the masquerade was missing. After
// the replay a pod that calls itself must get an answer. Other clients must not
// be disturbed, even if they got through without a masquerade.
func TestHairpinsThroughALossOfPostrouting(t *testing.T) {
	inCluster(t, func(l *lab) {
		d := l.Start()
		d.Suspend()
		l.flushPostrouting()
		hairpins := l.hairpins()
		outside := l.stream(cluster.Service(0)) // from outside, and the pods see it
		if e := l.entry(&knock{from: addrPort(outside.LocalAddr()), to: cluster.Service(0)}); e == nil || e.Reverse.DstIP.String() != addrPort(outside.LocalAddr()).Addr().String() {
			l.Fatalf("the client outside is masqueraded all the same: %v", e)
		}
		d.Signal(syscall.SIGCONT)
		l.Healed(1)
		for _, k := range hairpins {
			l.wantOpened("a hairpin after the replay", k)
		}
		l.wantAlive("after the replay", outside)
		l.wantEnded(2)
		d.WantLog("Ended flows that began while the rules were missing", "tcp=2", "unmasqueraded=2")
	})
}

func addrPort(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }

// wantEnded fails unless that many flows of TCP are ended, and no others. They may be so before
// that is counted.
func (l *lab) wantEnded(count int) {
	l.Helper()
	l.Until("the flows to be counted", func() error {
		got := l.Metrics()
		tcp, all := nodetest.Sum(got, "conntrack_deleted_total", `protocol="tcp"`), nodetest.Sum(got, "conntrack_deleted_total")
		if errors := nodetest.Sum(got, "conntrack_errors_total"); tcp != float64(count) || all != tcp || errors != 0 {
			return fmt.Errorf("%v flows of TCP were deleted, %v in all, with %v errors; want %d of TCP", tcp, all, errors, count)
		}
		return nil
	})
}

// halfOpen puts a flow into conntrack's table that bypassed a service. A pod has
// answered it, but the client has not confirmed the answer yet.
func (l *lab) halfOpen(to netip.AddrPort) *knock {
	l.Helper()
	const synReceived = 2 // TCP_CONNTRACK_SYN_RECV
	k := &knock{from: netip.MustParseAddrPort("192.0.2.77:4000"), to: to}
	l.Must(netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET, TimeOut: 600, ProtoInfo: &netlink.ProtoInfoTCP{State: synReceived},
		Forward: netlink.IPTuple{
			Protocol: nat.TCP, SrcIP: k.from.Addr().AsSlice(), SrcPort: k.from.Port(), DstIP: to.Addr().AsSlice(), DstPort: to.Port(),
		},
		Reverse: netlink.IPTuple{
			Protocol: nat.TCP, SrcIP: to.Addr().AsSlice(), SrcPort: to.Port(), DstIP: k.from.Addr().AsSlice(), DstPort: k.from.Port(),
		},
	}))
	return k
}
