package standby_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// clusters is the number of random clusters and losses.
var clusters = testkit.Size(16, 60)

// cluster draws nat of a node as kube-proxy writes it, with rules of other owners before, between
// and behind its jumps. Each service has one endpoint: no fate depends on chance.
func (d *deck) cluster() string {
	var chains, body strings.Builder
	rule := func(format string, args ...any) { fmt.Fprintf(&body, "-A "+format+"\n", args...) }
	for _, c := range []string{"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-MARK-MASQ", "KUBE-POSTROUTING", "OTHER-IN", "OTHER-OUT"} {
		fmt.Fprintf(&chains, ":%s - [0:0]\n", c)
	}
	for _, base := range []string{"PREROUTING", "OUTPUT", "POSTROUTING"} {
		others := "OTHER-IN"
		if base == "POSTROUTING" {
			others = "OTHER-OUT"
		}
		for range 3 {
			switch d.IntN(8) {
			case 0:
				rule("%s %s -j %s", base, d.prefix("-s", clients), pickOf(d, "ACCEPT", "RETURN"))
			case 1:
				rule("%s %s -j ACCEPT", base, d.prefix("-d", pickOf[byte](d, services, pods)))
			case 2:
				rule("%s -m limit --limit 1/day -j LOG", base)
			case 3:
				if d.IntN(3) == 0 {
					rule("%s -j %s", base, others)
				}
			}
			if base == "POSTROUTING" {
				continue
			}
			rule("%s -j KUBE-SERVICES", base)
		}
		if base == "POSTROUTING" {
			rule("%s -j KUBE-POSTROUTING", base)
		}
	}
	rule("OTHER-IN %s -p udp -j DNAT --to-destination 10.3.0.200", d.prefix("-d", services))
	rule("OTHER-IN %s -j RETURN", d.prefix("-s", clients))
	rule("OTHER-OUT %s -j SNAT --to-source 10.2.0.200", d.prefix("-s", clients))
	for n := 1; n <= 4; n++ {
		port := pickOf(d, ports...)
		svc, sep, ext := fmt.Sprintf("KUBE-SVC-%d", n), fmt.Sprintf("KUBE-SEP-%d", n), fmt.Sprintf("KUBE-EXT-%d", n)
		fmt.Fprintf(&chains, ":%s - [0:0]\n:%s - [0:0]\n:%s - [0:0]\n", svc, sep, ext)
		rule("KUBE-SERVICES -d 10.2.0.%d/32 -p udp -m udp --dport %d -j %s", n, port, svc)
		rule("KUBE-NODEPORTS -p udp -m udp --dport %d -j %s", port, ext)
		rule("%s -j KUBE-MARK-MASQ", ext)
		rule("%s -j %s", ext, svc)
		rule("%s ! -s 10.1.0.1/32 -d 10.2.0.%d/32 -p udp -m udp --dport %d -j KUBE-MARK-MASQ", svc, n, port)
		rule("%s -j %s", svc, sep)
		rule("%s -p udp -m udp -j DNAT --to-destination 10.3.0.%d:53", sep, n)
	}
	rule("KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS")
	rule("KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
	rule("KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN")
	rule("KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0")
	rule("KUBE-POSTROUTING -j MASQUERADE")
	return "*nat\n" + chains.String() + body.String() + "COMMIT\n"
}

// loss draws commands of iptables -t nat that remove rules, or add another owner's.
func (d *deck) loss() []string {
	all := []string{
		"-F", "-F PREROUTING", "-F OUTPUT", "-F POSTROUTING", "-F KUBE-SERVICES", "-F KUBE-SERVICES", "-F KUBE-POSTROUTING",
		"-F KUBE-NODEPORTS", "-F KUBE-MARK-MASQ", "-F KUBE-SVC-1", "-F KUBE-SEP-2", "-D PREROUTING -j KUBE-SERVICES",
		"-D OUTPUT -j KUBE-SERVICES", "-D POSTROUTING -j KUBE-POSTROUTING", "-D PREROUTING 1", "-F OTHER-IN",
		"-A PREROUTING -s 10.1.0.2 -j ACCEPT", "-I PREROUTING -d 10.2.0.3 -j ACCEPT", "-A POSTROUTING -j ACCEPT",
	}
	var drawn []string
	for range 1 + d.IntN(3) {
		drawn = append(drawn, pickOf(d, all...))
	}
	return drawn
}

// questions returns flows to each service, from each kind of place.
func questions() []flow {
	var all []flow
	port := uint16(2000)
	for _, from := range []string{"10.1.0.1", "10.1.0.2", "10.1.0.3", "10.3.0.1", "192.0.2.1"} {
		for n := byte(1); n <= 5; n++ {
			for _, to := range ports[:3] {
				address := netip.AddrFrom4([4]byte{10, 2, 0, n})
				if n == 5 {
					address = node[tableid.IPv4]
				}
				port++
				if from != "192.0.2.1" || n < 5 {
					all = append(all, flow{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.MustParseAddr(from), port), netip.AddrPortFrom(address, to)})
				}
			}
		}
	}
	return all
}

// TestPartOfTheRulesIsLost: a part of the rules is lost, and other owners have exemptions. With an
// open standby, each flow must have its fate by all rules, or by the remaining rules alone.
func TestPartOfTheRulesIsLost(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		l := newLab(t, tableid.IPv4)
		conn := dial(t)
		helped, opened := 0, 0
		for n := range uint64(clusters) {
			d := &deck{Rand: rand.New(rand.NewPCG(11, n)), family: tableid.IPv4}
			text, losses, flows := d.cluster(), d.loss(), questions()
			restore(t, nat.Family, text)
			whole := l.fates(flows)
			c := translate(t, source(t, conn, nat), nil)
			s := open(t, standby.Config{})
			must(t, s.Put(c))
			for _, words := range losses {
				// A command fails if its rule is gone already.
				_ = exec.Command("iptables-nft", append([]string{"-t", "nat"}, strings.Fields(words)...)...).Run()
			}
			left := l.fates(flows)
			became, err := c.Probe(conn)
			must(t, err)
			hooks, shut := c.Openable(became)
			must(t, s.Open(nat, hooks, nil))
			if len(hooks) > 0 {
				opened++
			}
			for f, is := range l.fates(flows) {
				switch {
				case is == whole[f]:
					if is != left[f] {
						helped++
					}
				case is == left[f]:
				default:
					t.Errorf("cluster %d, after %q, open %v, shut %v: %v fares %v; by all rules %v, by what is left %v\n%s", n, losses, hooks, shut, f, is, whole[f], left[f], text)
				}
			}
			if t.Failed() {
				return
			}
			must(t, s.Close())
			gone(t, conn)
			drop(t, nat)
		}
		t.Logf("of %d losses %d opened a hook; %d flows were translated by the standby", clusters, opened, helped)
		if opened < clusters/3 || helped < clusters {
			t.Error("the test shows little")
		}
	})
}
