package limits

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestProbesOfANodeInTrouble: another user holds every port that can reach 127.0.0.1:9475, and
// later a firewall rejects packets on loopback. A probe over TCP would fail, and kubelet would
// end canaryd during an outage. The manifests' probes keep working, as docs/how-it-works.md
// promises.
func TestProbesOfANodeInTrouble(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		needRoot(n)
		n.Load()
		d := n.Start()
		healthy := func(when string) {
			n.Helper()
			n.Logf("probes %s", when)
			n.Want(0, "health")
			n.Want(0, "health", "ready")
		}
		healthy("at rest")

		// 1,000 ports instead of a node's 28,232, in the test's own namespace.
		n.Must(os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("40000 40999"), 0o644))
		var held []net.Conn
		n.Must(nodetest.AsUser(stranger, func() error {
			for len(held) < 1000 {
				conn, err := net.DialTimeout("tcp", "127.0.0.1:9475", 20*time.Second)
				if errors.Is(err, unix.EADDRNOTAVAIL) {
					break // others hold some of the 1,000
				}
				if err != nil {
					return err
				}
				held = append(held, conn)
			}
			if connect("/run/canaryd/canaryd.sock") == nil {
				return errors.New("another user reaches the control socket")
			}
			return nil
		}))
		if len(held) < 900 {
			n.Errorf("another user holds %d connections, want about 1,000", len(held))
		}
		if _, err := net.DialTimeout("tcp", "127.0.0.1:9475", 20*time.Second); !errors.Is(err, unix.EADDRNOTAVAIL) {
			n.Errorf("a probe over TCP: got %v, want %v", err, unix.EADDRNOTAVAIL)
		}
		healthy("while another user holds all ports")
		for _, conn := range held {
			conn.Close()
		}
		n.Must(os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("20000 39999"), 0o644))
		n.Until("an answer at the port", nodetest.Ready)

		n.Must(write(n, "*filter\n-I INPUT -i lo -p tcp --dport 9475 -j REJECT --reject-with tcp-reset\nCOMMIT\n"))
		if conn, err := net.DialTimeout("tcp", "127.0.0.1:9475", 20*time.Second); err == nil {
			conn.Close()
			n.Error("a probe over TCP passes a firewall that rejects it")
		}
		healthy("behind a firewall")
		d.Stop()
	})
}
