package rules_test

import (
	"net/netip"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nodesNat is nat of a node with services and host ports, as kube-proxy 1.36, portmap 1.6 and
// Docker 28 write it.
const nodesNat = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-EXT-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-FW-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-BBBBBBBBBBBBBBBB - [0:0]
:KUBE-SVC-CCCCCCCCCCCCCCCC - [0:0]
:KUBE-EXT-CCCCCCCCCCCCCCCC - [0:0]
:KUBE-SVL-CCCCCCCCCCCCCCCC - [0:0]
:KUBE-SEP-CCCCCCCCCCCCCCCC - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-46d5e6e569f30aa7e18e0 - [0:0]
:DOCKER - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m comment --comment "kube-system/dns cluster IP" -m udp --dport 53 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d 198.51.100.7/32 -p udp -m comment --comment "kube-system/dns loadbalancer IP" -m udp --dport 53 -j KUBE-FW-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d 198.51.100.9/32 -p udp -m comment --comment "kube-system/dns external IP" -m udp --dport 53 -j KUBE-EXT-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "kube-system/dns-tcp cluster IP" -m tcp --dport 53 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d 10.96.0.11/32 -p sctp -m comment --comment "demo/signals cluster IP" -m sctp --dport 3868 -j KUBE-SVC-CCCCCCCCCCCCCCCC
-A KUBE-SERVICES -d 198.51.100.8/32 -p sctp -m comment --comment "demo/signals external IP" -m sctp --dport 3868 -j KUBE-EXT-CCCCCCCCCCCCCCCC
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -d 127.0.0.0/8 -j RETURN
-A KUBE-NODEPORTS -p udp -m comment --comment "kube-system/dns" -m udp --dport 30053 -j KUBE-EXT-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA ! -s 10.244.0.0/16 -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-MARK-MASQ
-A KUBE-SVC-AAAAAAAAAAAAAAAA -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-BBBBBBBBBBBBBBBB
-A KUBE-FW-AAAAAAAAAAAAAAAA -s 192.0.2.0/24 -j KUBE-EXT-AAAAAAAAAAAAAAAA
-A KUBE-EXT-AAAAAAAAAAAAAAAA -j KUBE-MARK-MASQ
-A KUBE-EXT-AAAAAAAAAAAAAAAA -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SEP-AAAAAAAAAAAAAAAA -s 10.244.1.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p udp -m udp -j DNAT --to-destination 10.244.1.2:53
-A KUBE-SEP-BBBBBBBBBBBBBBBB -p udp -m udp -j DNAT --to-destination 198.51.100.9:53
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SVC-CCCCCCCCCCCCCCCC -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-CCCCCCCCCCCCCCCC --mask 255.255.255.255 --rsource -j KUBE-SEP-CCCCCCCCCCCCCCCC
-A KUBE-SVC-CCCCCCCCCCCCCCCC -j KUBE-SEP-CCCCCCCCCCCCCCCC
-A KUBE-EXT-CCCCCCCCCCCCCCCC -s 10.244.0.0/16 -m comment --comment "pod traffic for demo/signals external destinations" -j KUBE-SVC-CCCCCCCCCCCCCCCC
-A KUBE-EXT-CCCCCCCCCCCCCCCC -m addrtype --src-type LOCAL -j KUBE-SVC-CCCCCCCCCCCCCCCC
-A KUBE-EXT-CCCCCCCCCCCCCCCC -j KUBE-SVL-CCCCCCCCCCCCCCCC
-A KUBE-SEP-CCCCCCCCCCCCCCCC -p sctp -m recent --set --name KUBE-SEP-CCCCCCCCCCCCCCCC --mask 255.255.255.255 --rsource -m sctp -j DNAT --to-destination 10.244.1.3:3868
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"net\" id: \"x\"" -m multiport --dports 8080 -j CNI-DN-46d5e6e569f30aa7e18e0
-A CNI-HOSTPORT-DNAT -p udp -m comment --comment "dnat name: \"net\" id: \"x\"" -m multiport --dports 5353,8125 -j CNI-DN-46d5e6e569f30aa7e18e0
-A CNI-DN-46d5e6e569f30aa7e18e0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.88.0.5:80
-A CNI-DN-46d5e6e569f30aa7e18e0 -p udp -m udp --dport 8125 -j DNAT --to-destination 10.88.0.5:8125
-A CNI-DN-46d5e6e569f30aa7e18e0 -p udp -m udp --dport 5353 -m mark --mark 0x1 -j DNAT --to-destination 10.88.0.5:5353
-A DOCKER ! -i docker0 -p udp -m udp --dport 123 -j DNAT --to-destination 172.17.0.2:123
-A DOCKER -i eth1 -p udp -m udp --dport 124 -j DNAT --to-destination 172.17.0.2:124
-A DOCKER -p udp -m udp --dport 7000:7999 -j DNAT --to-destination 172.17.0.3
COMMIT
`

// site is a node with an address on its uplink and another on docker0.
type site struct{}

func (site) Local(a netip.Addr) bool {
	return a.IsLoopback() || a == netip.MustParseAddr("192.0.2.1") || a == netip.MustParseAddr("172.17.0.1")
}

func (site) Beyond(iface string, a netip.Addr) bool {
	return iface != "docker0" || netip.MustParsePrefix("172.17.0.0/16").Contains(a)
}

func learnNat(t *testing.T, f rules.Family, text string) rules.Generation {
	t.Helper()
	protects := selector(t, "kube", "cni", "DOCKER", "KUBE-*").Protects
	return rules.Generation{f.Table(rules.Nat): rules.Protection{Chain: protects}.Extract(savefile.Tables(t, text)[rules.Nat], isMark)}
}

func TestWhichFlowsAreTranslated(t *testing.T) {
	const client, pod, container, self = "192.0.2.9:4000", "10.244.1.9:4000", "172.17.0.2:4000", "192.0.2.1:4000"
	const udp, sctp, tcp = nat.UDP, nat.SCTP, nat.TCP
	tests := []struct {
		story    string
		protocol uint8
		from, to string
		want     bool
	}{
		{"a pod asks DNS at its cluster IP", udp, pod, "10.96.0.10:53", true},
		{"the node does", udp, self, "10.96.0.10:53", true},
		{"a client outside does", udp, client, "10.96.0.10:53", true},
		{"another port of the cluster IP is no service", udp, pod, "10.96.0.10:54", false},
		{"another address is no service", udp, pod, "10.96.0.12:53", false},
		{"UDP has no say in SCTP", sctp, pod, "10.96.0.10:53", false},
		{"TCP at a service whose endpoints take UDP only", tcp, pod, "10.96.0.10:53", false},
		{"TCP at a host port", tcp, client, "192.0.2.1:8080", true},
		{"TCP at the UDP host port next to it", tcp, client, "192.0.2.1:8125", false},
		{"SCTP at a cluster IP with affinity", sctp, pod, "10.96.0.11:3868", true},
		{"a node port at the node", udp, client, "192.0.2.1:30053", true},
		{"a node port at another of its addresses", udp, client, "172.17.0.1:30053", true},
		{"the same port somewhere else", udp, pod, "192.0.2.77:30053", false},
		{"what returns before the node port's rule", udp, "127.0.0.1:4000", "127.0.0.1:30053", false},
		{"an external IP with policy Local, from a pod", sctp, pod, "198.51.100.8:3868", true},
		{"from the node", sctp, self, "198.51.100.8:3868", true},
		{"from outside there is no endpoint", sctp, client, "198.51.100.8:3868", false},
		{"a load balancer's address from outside of its source ranges", udp, pod, "198.51.100.7:53", false},
		{"from inside of them", udp, client, "198.51.100.7:53", true},
		{"an external IP that is an endpoint too may have been translated to itself", udp, client, "198.51.100.9:53", false},
		{"a host port", udp, client, "192.0.2.1:8125", true},
		{"a host port from the node", udp, self, "192.0.2.1:8125", true},
		{"a host port that a mark decides on", udp, client, "192.0.2.1:5353", false},
		{"Docker's port from outside", udp, client, "192.0.2.1:123", true},
		{"from the bridge, which Docker's own proxy serves", udp, container, "192.0.2.1:123", false},
		{"from the node, which comes in by no interface", udp, self, "192.0.2.1:123", true},
		{"a port of one interface, which conntrack does not know", udp, client, "192.0.2.1:124", false},
		{"a range of a thousand ports", udp, client, "192.0.2.1:7999", true},
		{"beyond it", udp, client, "192.0.2.1:8000", false},
		{"a container asked directly", udp, client, "172.17.0.3:7000", false},
	}
	translations := nat.New(site{}, learnNat(t, rules.IPv4, nodesNat).NatHooks(rules.IPv4))
	for _, test := range tests {
		flow := nat.Flow{Protocol: test.protocol, Source: netip.MustParseAddrPort(test.from), Destination: netip.MustParseAddrPort(test.to)}
		if got := translations.Translates(flow); got != test.want {
			t.Errorf("%s: %d %s -> %s is translated: %t, want %t", test.story, test.protocol, test.from, test.to, got, test.want)
		}
	}
}

// TestWhatIsExemptIsNotTranslated: a rule may exempt a flow from translation. Then Translates
// must return false, even if it does not understand the rule, so that canaryd does not delete
// the flow.
func TestWhatIsExemptIsNotTranslated(t *testing.T) {
	const head = "*nat\n:OUTPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n:KUBE-C - [0:0]\n-A OUTPUT -j KUBE-A\n"
	const dnat = " -p udp -m udp --dport 53 -j DNAT --to-destination 10.1.1.1:53\n"
	tests := []struct {
		story, chains string
		want          bool
	}{
		{"nothing in its way", "-A KUBE-A" + dnat, true},
		{"an exemption for others", "-A KUBE-A -d 10.9.9.9 -j ACCEPT\n-A KUBE-A" + dnat, true},
		{"accepted before", "-A KUBE-A -d 10.96.0.0/16 -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"accepted after", "-A KUBE-A" + dnat + "-A KUBE-A -d 10.96.0.0/16 -j ACCEPT\n", true},
		{"accepted by a mark perhaps", "-A KUBE-A -m mark --mark 0x1 -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"accepted behind a mark perhaps", "-A KUBE-A -m mark --mark 0x1 -j KUBE-B\n-A KUBE-B -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"accepted in another chain before", "-A KUBE-A -j KUBE-B\n-A KUBE-B -d 10.96.0.10 -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"returned in another chain before", "-A KUBE-A -j KUBE-B\n-A KUBE-B -d 10.96.0.10 -j RETURN\n-A KUBE-A" + dnat, true},
		{"returned in this chain", "-A KUBE-A -p udp -j RETURN\n-A KUBE-A" + dnat, false},
		{"redirected before", "-A KUBE-A -p udp -j REDIRECT --to-ports 53\n-A KUBE-A" + dnat, false},
		{"redirected perhaps", "-A KUBE-A -m mark --mark 0x1 -p udp -j REDIRECT --to-ports 53\n-A KUBE-A" + dnat, false},
		{"accepted if no route makes it local", "-A KUBE-A -m addrtype ! --dst-type LOCAL -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"accepted if a route makes it local", "-A KUBE-A -m addrtype --dst-type LOCAL -j ACCEPT\n-A KUBE-A" + dnat, false},
		{"masqueraded before, which the kernel refuses", "-A KUBE-A -j MASQUERADE\n-A KUBE-A" + dnat, false},
		{"in another owner's chain before", "-A KUBE-A -j OTHERS\n-A KUBE-A" + dnat, false},
		{"an opaque rule before", "-A KUBE-A " + opaque("") + "\n-A KUBE-A" + dnat, false},
		{"an opaque rule before that perhaps marks", "-A KUBE-A " + opaque("MARK") + "\n-A KUBE-A" + dnat, true},
		{"an opaque rule before that perhaps jumps", "-A KUBE-A " + opaque("KUBE-B") + "\n-A KUBE-A" + dnat, false},
		{"gone to where nothing is", "-A KUBE-A -g KUBE-B\n-A KUBE-A" + dnat, false},
		{"gone to where it is", "-A KUBE-A -g KUBE-B\n-A KUBE-B" + dnat, true},
		{"through chains that call each other, which the kernel refuses", "-A KUBE-A -j KUBE-B\n-A KUBE-B -j KUBE-C\n-A KUBE-C -j KUBE-B\n-A KUBE-C" + dnat, false},
		{"every address but one", "-A KUBE-A ! -d 10.9.9.9" + dnat, true},
		{"every address but it", "-A KUBE-A ! -d 10.96.0.10" + dnat, false},
		{"to nowhere of its own", "-A KUBE-A -d 10.96.0.10 -j KUBE-C\n", false},
		{"with an unknown match", "-A KUBE-A -m quux --quux 1" + dnat, false},
	}
	flow := nat.Flow{Protocol: nat.UDP, Source: netip.MustParseAddrPort("192.0.2.1:4000"), Destination: netip.MustParseAddrPort("10.96.0.10:53")}
	for _, test := range tests {
		translations := nat.New(site{}, learnNat(t, rules.IPv4, head+test.chains+"COMMIT\n").NatHooks(rules.IPv4))
		if got := translations.Translates(flow); got != test.want {
			t.Errorf("%s: translated: %t, want %t", test.story, got, test.want)
		}
	}
}

// opaque returns the text of an opaque rule with that target.
func opaque(target string) string { return rules.OpaqueRule([]byte(target), target, "unread").Spec }

func TestTranslationsOfIPv6(t *testing.T) {
	g := learnNat(t, rules.IPv6, `*nat
:PREROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d fd00:96::a/128 -p udp -m udp --dport 53 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SVC-AAAAAAAAAAAAAAAA -p udp -m udp -j DNAT --to-destination [fd00:244::2]:53
COMMIT
`)
	flow := func(to string) nat.Flow {
		return nat.Flow{Protocol: nat.UDP, Source: netip.MustParseAddrPort("[2001:db8::9]:4000"), Destination: netip.MustParseAddrPort(to)}
	}
	translations := nat.New(site{}, g.NatHooks(rules.IPv6))
	for to, want := range map[string]bool{"[fd00:96::a]:53": true, "[fd00:96::b]:53": false, "[fd00:244::2]:53": false} {
		if got := translations.Translates(flow(to)); got != want {
			t.Errorf("%s is translated: %t, want %t", to, got, want)
		}
	}
	if !nat.New(site{}, g.NatHooks(rules.IPv4)).Empty() || translations.Empty() {
		t.Error("IPv6's rules translate IPv4, or nothing")
	}
}
