package packets

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// nativeService is a service that only a native table translates.
var nativeService = cluster.Service(50)

// writeNative writes kube-proxy's native table with that one service, over TCP
// and UDP.
func (l *lab) writeNative() {
	l.Helper()
	at, pods := nativeService, l.Endpoints(0)
	nstest.CommandInput(l.T, fmt.Sprintf(`table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { %[1]s . tcp . %[2]d : goto tcp-service, %[1]s . udp . 53 : goto udp-service }
	}
	chain tcp-service { meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : %[3]s . %[5]d, 1 : %[4]s . %[5]d }; }
	chain udp-service { meta l4proto udp dnat ip to numgen random mod 2 map { 0 : %[3]s . %[6]d, 1 : %[4]s . %[6]d }; }
	chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
}
`, at.Addr(), at.Port(), pods[0], pods[len(pods)-1], 8080, 5353), "nft", "-f", "-")
}

// TestFlowsThroughANativeFlush: clients first call a service while its native
// table is lost. After the replay they must get answers at the port that they
// kept. This holds over UDP, and over TCP, where each SYN keeps an untranslated
// flow alive. Established connections continue.
func TestFlowsThroughANativeFlush(t *testing.T) {
	inCluster(t, func(l *lab) {
		nstest.NeedProgram(l.T, "nft")
		l.writeNative()
		d := l.Start()
		before := l.stream(nativeService)
		datagrams := cluster.Datagrams(nativeService)
		l.wantAnswer("a client before the flush", l.dial("udp4", datagrams), l.Endpoints(0)...)
		l.Until("guarding the native table", func() error {
			if stdout, _ := l.Want(0, "status"); !strings.Contains(stdout, "ip kube-proxy  intact") {
				return fmt.Errorf("canaryd status prints\n%s", stdout)
			}
			return nil
		})

		d.Suspend() // extends the outage for as long as the test needs
		nstest.Command(l.T, "nft", "flush", "table", "ip", "kube-proxy")
		meanwhile, other := l.dial("udp4", datagrams), l.dial("udp4", netip.AddrPortFrom(nativeService.Addr(), 54))
		l.wantSilence("during the outage", meanwhile)
		l.wantSilence("another port of the service during the outage", other)
		connected := make(chan error, 1)
		go func() {
			connected <- l.In(cluster.Client, func() error {
				c, err := net.DialTimeout("tcp4", nativeService.String(), answersIn)
				if err == nil {
					_ = c.Close()
				}
				return err
			})
		}()
		testkit.Pass(l, silentFor, "that the outage lasts for some SYNs")
		d.Signal(syscall.SIGCONT)
		l.Healed(1)

		l.wantAnswer("after the replay", meanwhile, l.Endpoints(0)...)
		if err := <-connected; err != nil {
			l.Errorf("a connection that began during the outage: %v", err)
		}
		l.wantAlive("after the replay", before)
		if !l.tracked(other) {
			l.Errorf("the flow to another port of the service is gone from conntrack")
		}
		for _, protocol := range []string{"tcp", "udp"} {
			if n := nodetest.Sum(l.Metrics(), "conntrack_deleted_total", `family="ipv4"`, `protocol="`+protocol+`"`); n != 1 {
				l.Errorf("%v flows of %s were deleted, want 1", n, protocol)
			}
		}
		d.WantLog("Ended flows that began while the rules were missing", "udp=1")
	})
}
