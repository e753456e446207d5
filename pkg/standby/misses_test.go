package standby_test

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMisses: the first packet of an untranslated flow to a service must be a miss, from the node
// itself and from outside. It is no miss if the real table or the open copy translates the flow, or
// if it is to no service.
func TestMisses(t *testing.T) {
	services := map[tableid.Family]netip.Addr{tableid.IPv4: netip.MustParseAddr("192.0.2.99"), tableid.IPv6: netip.MustParseAddr("2001:db8::99")}
	clients := map[tableid.Family]netip.Addr{tableid.IPv4: netip.MustParseAddr("192.0.2.50"), tableid.IPv6: netip.MustParseAddr("2001:db8::50")}
	for family, service := range services {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				l := newLab(t, family)
				id := family.Table("nat")
				rules := natWithOutput(service.String())
				restore(t, family, rules)
				misses, err := standby.ListenMisses()
				must(t, err)
				t.Cleanup(func() { misses.Close() })
				s := open(t, standby.Config{Misses: misses.Group()})
				must(t, s.Put(copyOf(t, id)))
				port := uint16(20000)
				missed := func(from, to netip.Addr, service uint16) bool {
					t.Helper()
					port++
					l.send(flow{unix.IPPROTO_UDP, netip.AddrPortFrom(from, port), netip.AddrPortFrom(to, service)})
					return received(t, misses)
				}
				got := map[string]bool{}
				got["translated"] = missed(node[family], service, 80)
				drop(t, family.Table("nat"))
				got["lost"] = missed(node[family], service, 80)
				got["lost, from outside"] = missed(clients[family], service, 80)
				got["lost, of another port"] = missed(node[family], service, 81)
				got["lost, of another address"] = missed(node[family], clients[family], 80)
				must(t, s.Open(id, s.Held(id).Hooks(), nil))
				got["the copy translates"] = missed(node[family], service, 80)
				must(t, s.Shut(id))
				got["shut"] = missed(node[family], service, 80)
				want := map[string]bool{"translated": false, "lost": true, "lost, from outside": true, "lost, of another port": false,
					"lost, of another address": false, "the copy translates": false, "shut": true}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("misses (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// received reports whether a miss arrives within a moment.
func received(t *testing.T, m *standby.Misses) bool {
	t.Helper()
	must(t, m.Until(time.Now().Add(200*time.Millisecond)))
	switch err := m.Receive(); {
	case err == nil:
		return true
	case errors.Is(err, os.ErrDeadlineExceeded):
		return false
	default:
		t.Fatal(err)
		return false
	}
}

// TestMissesFollow: the set of services must match the rules after each change. The copy is built,
// followed, or written when a hook is opened.
func TestMissesFollow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "iptables-nft-restore")
		misses, err := standby.ListenMisses()
		must(t, err)
		t.Cleanup(func() { misses.Close() })
		conn, s := dial(t), open(t, standby.Config{Misses: misses.Group(), Piece: 4096})
		for step, without := range []int{-1, 17, 250, -1} {
			restore(t, nat.Family, bigNat(uint64(step), without))
			c := translate(t, source(t, conn, nat), s.Held(nat))
			if step%2 == 0 {
				must(t, s.Put(c))
			} else {
				must(t, s.Open(nat, nil, c))
			}
			for _, service := range []int{0, 17, 250, 299} {
				key := []byte{10, 96, byte(service / 200), byte(service % 200), unix.IPPROTO_TCP, 0, 0, 0, 0, 80, 0, 0}
				is, err := conn.HasElement(nat.Family, standby.TableName, "services", key)
				must(t, err)
				if is != (service != without) {
					t.Errorf("step %d: service %d is in the set: %t", step, service, is)
				}
			}
		}
	})
}

// TestMissesEnd: Close must end a Receive that waits.
func TestMissesEnd(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		misses, err := standby.ListenMisses()
		must(t, err)
		ended := make(chan error)
		go func() { ended <- misses.Receive() }()
		must(t, misses.Close())
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("it says %v", err)
		}
	})
}
