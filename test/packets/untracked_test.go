package packets

import (
	"fmt"
	"net"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// cacheDNS makes the node itself answer at the cluster's DNS address, as
// NodeLocal DNSCache does. Rules in raw keep its packets from conntrack, and so
// from kube-proxy's rules in nat.
func (l *lab) cacheDNS() {
	l.Helper()
	dns := cluster.DNS()
	nstest.Command(l.T, "ip", "addr", "add", dns.Addr().String()+"/32", "dev", "lo")
	server, err := net.ListenPacket("udp4", dns.String())
	l.Must(err)
	l.Cleanup(func() { _ = server.Close() })
	go func() {
		question := make([]byte, 100)
		for {
			_, from, err := server.ReadFrom(question)
			if err != nil {
				return
			}
			_, _ = server.WriteTo([]byte("cache"), from)
		}
	}()
	const skip = `-m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`
	l.Must(l.Programs.RestoreNoflush(l.Context(), rules.IPv4, fmt.Sprintf(`*raw
-I PREROUTING 1 -d %[1]s/32 -p udp -m udp --dport 53 %[2]s
-I OUTPUT 1 -s %[1]s/32 -p udp -m udp --sport 53 %[2]s
COMMIT
`, dns.Addr(), skip)))
}

// TestFlowsThroughALossOfRaw: while NOTRACK is missing a flow is tracked, and nat
// translates it. After the replay the cache must answer the same client again,
// because its packets bypass conntrack. After a loss of raw alone the sweep ends
// nothing. After a loss of nat too it ends an entry that no client misses.
func TestFlowsThroughALossOfRaw(t *testing.T) {
	inCluster(t, func(l *lab) {
		l.cacheDNS()
		d := l.Start("--protect=kube,cni,node-local-dns")
		wantCache := func(what string, c net.Conn, tracked bool) {
			l.Helper()
			if got := l.answer(what, c); got != "cache" {
				l.Errorf("%s: %q answers", what, got)
			}
			if l.tracked(c) != tracked {
				l.Errorf("%s: conntrack knows the flow: %t", what, !tracked)
			}
		}
		before := l.dial("udp4", cluster.DNS())
		wantCache("before the flush", before, false)

		d.Suspend() // extends the outage for as long as the test needs
		l.Must(l.Programs.Flush(l.Context(), rules.IPv4, rules.Raw, ""))
		meanwhile := l.dial("udp4", cluster.DNS())
		l.wantAnswer("without NOTRACK", meanwhile, l.Endpoints(0)...)
		l.wantAnswer("a client of before, without NOTRACK", before, l.Endpoints(0)...)
		if !l.tracked(meanwhile) || !l.tracked(before) {
			l.Error("without NOTRACK conntrack does not know the flows")
		}
		d.Signal(syscall.SIGCONT)
		l.Healed(1)
		wantCache("after the replay", meanwhile, true) // its entry exists until it expires
		wantCache("a client of before, after the replay", before, true)
		wantCache("a new client, after the replay", l.dial("udp4", cluster.DNS()), false)
		if n := nodetest.Sum(l.Metrics(), "conntrack_deleted_total"); n != 0 {
			l.Errorf("the sweep ended %v flows although nat was never missing", n)
		}

		d.Suspend()
		l.Must(l.Programs.Flush(l.Context(), rules.IPv4, rules.Raw, ""))
		l.flushNat()
		both := l.dial("udp4", cluster.DNS())
		wantCache("without NOTRACK and nat", both, true)
		d.Signal(syscall.SIGCONT)
		l.Healed(2)
		l.Until("the sweep to end the flow that was not translated", func() error {
			if n := nodetest.Sum(l.Metrics(), "conntrack_deleted_total", `protocol="udp"`); n != 1 {
				return fmt.Errorf("it ended %v", n)
			}
			return nil
		})
		wantCache("after the replay of both", both, false)
	})
}
