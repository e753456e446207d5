package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/standby"
)

// guardBoth names kube-proxy's native tables.
const guardBoth = "--protect=kube,nft:ip:kube-proxy,nft:ip6:kube-proxy"

// translated are a service of each family and its pod. The addresses of the pods
// belong to the node.
var translated = []struct{ family, service, pod, kind string }{
	{"ip", "203.0.113.10", "198.51.100.1", "ipv4_addr"},
	{"ip6", "2001:db8:1::10", "2001:db8::1", "ipv6_addr"},
}

// nativeService is a native table with one service, in the style of kube-proxy's
// nftables mode.
const nativeService = `table FAMILY kube-proxy {
	map service-ips { type KIND . inet_proto . inet_service : verdict; elements = { SERVICE . tcp . 80 : goto service-A } }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }
	chain services { FAMILY daddr . meta l4proto . th dport vmap @service-ips; }
	chain service-A { meta l4proto tcp dnat FAMILY to numgen random mod 2 map { 0 : POD . 8080, 1 : POD . 8080 }; }
	chain masquerading { meta mark & 0x4000 == 0 return; masquerade; }
}
`

// onTranslated is a node whose native tables translate a service of each family.
// Without them a connection to a service gets no answer.
func onTranslated(t *testing.T, backend iptables.Backend, body func(n *nodetest.Node)) {
	nodetest.On(t, backend, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft", "ip")
		n.Load()
		nstest.CommandInput(n.T, `link add away type veth peer name lost
link set away up
link set lost up
addr add 198.51.100.1/32 dev lo
addr add 2001:db8::1/128 dev lo nodad
route add default dev away
route add ::/0 dev away
`, "ip", "-batch", "-")
		for _, f := range translated {
			listener, err := net.Listen("tcp", net.JoinHostPort(f.pod, "8080"))
			n.Must(err)
			defer listener.Close()
			go func() {
				for {
					c, err := listener.Accept()
					if err != nil {
						return
					}
					_, _ = io.WriteString(c, "pod")
					_ = c.Close()
				}
			}()
			text := strings.NewReplacer("FAMILY", f.family, "KIND", f.kind, "SERVICE", f.service, "POD", f.pod).Replace(nativeService)
			nstest.CommandInput(n.T, text, "nft", "-f", "-")
		}
		n.Until("the services to answer", answers)
		body(n)
	})
}

// answers returns nil if a new connection to each service is answered.
func answers() error {
	for _, f := range translated {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(f.service, "80"), 200*time.Millisecond)
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(time.Second))
		text, err := io.ReadAll(c)
		_ = c.Close()
		if string(text) != "pod" {
			return fmt.Errorf("%s: %q, %w", f.service, text, err)
		}
	}
	return nil
}

// standing counts kube-proxy's existing tables.
func standing(n *nodetest.Node) (tables int) {
	n.Helper()
	return strings.Count(nstest.Command(n.T, "nft", "list", "tables")+"\n", " kube-proxy\n")
}

// wantNativeState waits until status and metrics say this of the standby of both tables.
func wantNativeState(n *nodetest.Node, state string) {
	n.Helper()
	n.Until("the standby of native tables to be "+state, func() error {
		tables := n.Status().Native
		if len(tables) != len(translated) {
			return fmt.Errorf("%d native tables are guarded", len(tables))
		}
		for _, t := range tables {
			if t.Standby == nil || t.Standby.State != state {
				return fmt.Errorf("table %s: %+v", t.Table, t.Standby)
			}
			family, _, _ := strings.Cut(t.Table, " ")
			if n.Metrics()[fmt.Sprintf("native_standby{family=%q,state=%q,table=%q}", family, state, t.Table)] != 1 {
				return fmt.Errorf("table %s: the metrics do not say %s", t.Table, state)
			}
		}
		return nil
	})
}

// copyOf is the name of the standby's copy of kube-proxy's table.
const copyOf = standby.TableName + "-kube-proxy"

// TestNativeStandbyTranslates: native tables are missing while canaryd settles.
// New connections of both families must be translated; without a standby none is.
// After the proof no gate may be open, and the record must mention the standby.
// The same holds next to iptables-legacy.
func TestNativeStandbyTranslates(t *testing.T) {
	for _, test := range []struct {
		flag    string
		backend iptables.Backend
	}{{"on", iptables.NFT}, {"on", iptables.Legacy}, {"off", iptables.NFT}} {
		flag := test.flag
		t.Run(flag+"/"+string(test.backend), func(t *testing.T) {
			onTranslated(t, test.backend, func(n *nodetest.Node) {
				settle := map[string]string{"on": "4s", "off": "1s"}[flag]
				d := n.Start("--standby="+flag, "--settle="+settle, guardBoth)
				if flag == "on" {
					wantNativeState(n, "armed")
				}
				for i, flush := range []string{"flush ruleset", "flush table ip kube-proxy; flush table ip6 kube-proxy"} {
					missing := func() bool {
						return standing(n) == 0 || i == 1 && !strings.Contains(nstest.Command(n.T, "nft", "list", "table", "ip", "kube-proxy"), "jump services")
					}
					// flushed flushes, and reports whether the gap was translated.
					flushed := func() (connected bool) {
						nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
						for !connected && missing() {
							connected = answers() == nil && missing()
						}
						n.Until("the tables to be back", func() error {
							if err := nodetest.Ready(); err != nil { // the cheapest check
								return err
							}
							if missing() {
								return errors.New("they are not")
							}
							return errors.Join(nodetest.Ready(), answers())
						})
						return connected
					}
					if flag == "off" && flushed() {
						n.Errorf("%s: without a standby connections are translated while the tables are missing", flush)
					}
					for flag == "on" && !flushed() { // this process was starved for longer than --settle
						wantNativeState(n, "armed")
					}
				}
				if flag == "off" {
					d.Stop()
					return
				}
				wantNativeState(n, "armed")
				for _, f := range translated {
					if text := nstest.Command(n.T, "nft", "list", "table", f.family, copyOf); strings.Contains(text, "elements = { ipv") {
						n.Errorf("a gate is open behind the proof:\n%s", text)
					}
				}
				_, stdout, _ := n.Canaryd("status", "--flush="+n.Status().Flushes[0].ID)
				if !strings.Contains(stdout, "translated by the standby (table ip kube-proxy, table ip6 kube-proxy) after ") {
					n.Errorf("the record says nothing of the standby:\n%s", stdout)
				}
				nstest.Command(n.T, "nft", "flush", "ruleset")
				n.Until("a connection through the standby", answers)
				d.Kill()
				n.Until("the copies to be gone", func() error {
					if tables := nstest.Command(n.T, "nft", "list", "tables"); strings.Contains(tables, copyOf) {
						return errors.New(tables)
					}
					return nil
				})
			})
		})
	}
}
