package owners

import (
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// dockerBridge is the rules of Docker 29 for a network with one published port.
// --allow-direct-routing leaves its subnet to the chains of the bridge.
const dockerBridge = `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
	map filter-forward-out-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-out__docker0 }; }
	map nat-postrouting-in-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-in__docker0 }; }
	map nat-postrouting-out-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-out__docker0 }; }
	chain filter-FORWARD { type filter hook forward priority 0; oifname vmap @filter-forward-in-jumps; iifname vmap @filter-forward-out-jumps; }
	chain nat-OUTPUT { type nat hook output priority -100; ip daddr != 127.0.0.0/8 fib daddr type local counter jump nat-prerouting-and-output; }
	chain nat-POSTROUTING { type nat hook postrouting priority srcnat; iifname vmap @nat-postrouting-out-jumps; oifname vmap @nat-postrouting-in-jumps; }
	chain nat-PREROUTING { type nat hook prerouting priority dstnat; fib daddr type local counter jump nat-prerouting-and-output; }
	chain nat-prerouting-and-output { iifname != "docker0" tcp dport 8080 counter dnat to 172.17.0.2:80 comment "DNAT"; }
	chain filter-forward-in__docker0 { ct state established,related counter accept; iifname "docker0" counter accept comment "ICC"; ip daddr 172.17.0.2 tcp dport 80 counter accept; counter drop comment "UNPUBLISHED PORT DROP"; }
	chain filter-forward-out__docker0 { ct state established,related counter accept; counter accept comment "OUTGOING"; }
	chain nat-postrouting-in__docker0 { }
	chain nat-postrouting-out__docker0 { oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade comment "MASQUERADE"; }
}
`

// TestUnpublishedPort: while a map of Docker is flushed, a client reaches an
// unpublished port of a container, or a published port does not answer. After the
// replay packets must find both as before.
func TestUnpublishedPort(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "ip", "nft")
		network(n)
		for _, args := range []string{
			"netns add container",
			"link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up",
			"link add veth0 type veth peer name eth0 netns container", "link set veth0 master docker0", "link set veth0 up",
			"-n container address add 172.17.0.2/16 dev eth0", "-n container link set eth0 up", "-n container route add default via 172.17.0.1",
			"-n client route add 172.17.0.0/16 via " + nodeAddress,
		} {
			nstest.Command(n.T, "ip", strings.Fields(args)...)
		}
		serve(n, "container")
		unpublished, err := inside(n, "container", func() (net.Listener, error) { return net.Listen("tcp4", ":81") })
		n.Must(err)
		n.Cleanup(func() { unpublished.Close() })
		go func() {
			for {
				conn, err := unpublished.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, "unpublished")
				conn.Close()
			}
		}()
		nstest.CommandInput(n.T, dockerBridge, "nft", "-f", "-")
		want := nstest.Command(n.T, "nft", "-s", "list", "table", "ip", "docker-bridges")
		p := n.Launch("--protect=docker")
		n.Until("canaryd to be ready", nodetest.Ready)

		for i, flush := range []struct{ part, unpublished, published string }{
			{"map ip docker-bridges filter-forward-in-jumps", "unpublished", "container"},
			{"chain ip docker-bridges filter-forward-in__docker0", "unpublished", "container"},
			{"chain ip docker-bridges filter-FORWARD", "unpublished", "container"},
			{"chain ip docker-bridges nat-prerouting-and-output", "", ""},
			{"chain ip docker-bridges nat-PREROUTING", "", ""},
		} {
			wantPorts(n, "before flush "+flush.part, "", "container")
			p.Suspend() // extends the outage for as long as the test needs
			nstest.Command(n.T, "nft", append([]string{"flush"}, strings.Fields(flush.part)...)...)
			wantPorts(n, "after flush "+flush.part, flush.unpublished, flush.published)
			p.Signal(syscall.SIGCONT)
			n.Healed(i + 1)
			wantPorts(n, "after the replay of "+flush.part, "", "container")
			if got := nstest.Command(n.T, "nft", "-s", "list", "table", "ip", "docker-bridges"); got != want {
				n.Errorf("after flush %s the table is\n%s\nwant\n%s", flush.part, got, want)
			}
		}
	})
}

// wantPorts asks from outside for the container's unpublished port, and for its published one.
func wantPorts(n *nodetest.Node, when, unpublished, published string) {
	n.Helper()
	if got := reach(n, "172.17.0.2:81"); got != unpublished {
		n.Errorf("%s: %q answers at the unpublished port, want %q", when, got, unpublished)
	}
	if got := reach(n, fmt.Sprintf("%s:8080", nodeAddress)); got != published {
		n.Errorf("%s: %q answers at the published port, want %q", when, got, published)
	}
}

// reach returns an address's answer to the client, "" if none.
func reach(n *nodetest.Node, address string) string {
	n.Helper()
	text, _ := inside(n, "client", func() (string, error) {
		conn, err := net.DialTimeout("tcp4", address, time.Second)
		if err != nil {
			return "", err
		}
		defer conn.Close()
		n.Must(conn.SetDeadline(time.Now().Add(2 * time.Second)))
		text, err := io.ReadAll(conn)
		return string(text), err
	})
	return text
}
