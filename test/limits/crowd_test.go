package limits

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestCrowds: 900 connections to the TCP port are open, and as many to the control socket. Half
// of them have sent the beginning of a request. Probes, status and replays work, and canaryd
// keeps few of the connections open.
func TestCrowds(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		for _, place := range [][2]string{{"tcp", "127.0.0.1:9475"}, {"unix", "/run/canaryd/canaryd.sock"}} {
			for i := range 900 {
				conn, err := net.DialTimeout(place[0], place[1], 20*time.Second)
				n.Must(err)
				n.Cleanup(func() { _ = conn.Close() })
				if i%2 == 1 {
					_, _ = io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") // it may be closed by now
				}
			}
			n.Must(nodetest.Ready())
			n.Want(0, "status")
			n.Want(0, "health")
		}
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		n.Healed(1)
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
		n.Must(err)
		if len(files) > 200 {
			n.Errorf("canaryd has %d files open, want at most 200", len(files))
		}
		within(n, d, "in the crowd")
		d.Stop()
	})
}

// TestLogStorm: by an operator's mistake the control socket is open to all, and another user
// connects 3,000 times. The log has a bounded number of lines about that, and says how many it
// omits. It has each line about other events.
func TestLogStorm(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		needRoot(n)
		n.Load()
		d := n.Start()
		n.Must(os.Chmod("/run/canaryd", 0o755))
		n.Must(os.Chmod("/run/canaryd/canaryd.sock", 0o666))
		n.Must(nodetest.AsUser(stranger, func() error {
			for range 3000 {
				if err := connect("/run/canaryd/canaryd.sock"); err != nil {
					return err
				}
			}
			return nil
		}))
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		n.Healed(1)
		const refused = "A connection to the control socket was refused"
		if got := strings.Count(d.Log(), refused); got == 0 || got > 100 {
			n.Errorf("the log has %d lines of refused connections, want 1 to 100", got)
		}
		d.WantLog(refused, "left out")
		d.WantLog("Rules were lost")
		d.WantLog("The rules are back and proved")
		d.Stop()
	})
}
