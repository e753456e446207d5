package rules_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

// masqueradingNat is nat of a node with a service of two pods, its node port, a host port and a
// container's port. kube-proxy 1.36, portmap 1.6 and Docker 28 write it this way.
const masqueradingNat = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-EXT-A - [0:0]
:KUBE-SEP-A1 - [0:0]
:KUBE-SEP-A2 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:CNI-DN-46d5e6e569f30aa7e18e0 - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "demo/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment "demo/web" -m tcp --dport 30080 -j KUBE-EXT-A
-A KUBE-EXT-A -m comment --comment "masquerade traffic for demo/web external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-A -j KUBE-SVC-A
-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.96.0.10/32 -p tcp -m comment --comment "demo/web cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A1 --mask 255.255.255.255 --rsource -j KUBE-SEP-A1
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-A1
-A KUBE-SVC-A -j KUBE-SEP-A2
-A KUBE-SEP-A1 -s 10.244.1.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A1 -p tcp -m tcp -j DNAT --to-destination 10.244.1.2:8080
-A KUBE-SEP-A2 -s 10.244.1.3/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-A2 -p tcp -m tcp -j DNAT --to-destination 10.244.1.3:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"net\" id: \"x\"" -m multiport --dports 8081 -j CNI-DN-46d5e6e569f30aa7e18e0
-A CNI-DN-46d5e6e569f30aa7e18e0 -s 10.244.0.0/16 -p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-46d5e6e569f30aa7e18e0 -p tcp -m tcp --dport 8081 -j DNAT --to-destination 10.244.3.4:80
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
COMMIT
`

// The source of a hairpin is the pod that it is sent to.
const hairpin = "10.244.1.2:4000"

func masquerades(t *testing.T, text, from, to, backend string) bool {
	t.Helper()
	flow := nat.Flow{Protocol: nat.TCP, Source: netip.MustParseAddrPort(from), Destination: netip.MustParseAddrPort(to)}
	return nat.New(site{}, learnNat(t, rules.IPv4, text).NatHooks(rules.IPv4)).Masquerades(flow, netip.MustParseAddrPort(backend))
}

func TestWhichFlowsAreMasqueraded(t *testing.T) {
	const client, pod, self, loopback = "192.0.2.9:4000", "10.244.1.9:4000", "192.0.2.1:4000", "127.0.0.1:4000"
	const service, nodePort, hostPort = "10.96.0.10:80", "192.0.2.1:30080", "192.0.2.1:8081"
	const first, second, host = "10.244.1.2:8080", "10.244.1.3:8080", "10.244.3.4:80"
	tests := []struct {
		story, from, to, backend string
		want                     bool
	}{
		{"a pod comes back to itself", hairpin, service, first, true},
		{"it comes to the other one", hairpin, service, second, false},
		{"another pod", pod, service, first, false},
		{"a client outside of the cluster", client, service, first, true},
		{"to the other pod", client, service, second, true},
		{"to a pod that is none of the service's", client, service, "10.244.1.4:8080", false},
		{"to another port of it", client, service, "10.244.1.2:8081", false},
		{"a client at the node port", client, nodePort, first, true},
		{"a pod at the node port", pod, nodePort, second, true},
		{"a pod at a host port", pod, hostPort, host, true},
		{"a client at a host port keeps its address", client, hostPort, host, false},
		{"the node, whose address may be the one that it gets", self, service, first, false},
		{"the node from its loopback address, which never is", loopback, nodePort, first, true},
		{"what is no service", client, "10.96.0.11:80", first, false},
	}
	for _, test := range tests {
		if got := masquerades(t, masqueradingNat, test.from, test.to, test.backend); got != test.want {
			t.Errorf("%s: %s -> %s by %s is masqueraded: %t, want %t", test.story, test.from, test.to, test.backend, got, test.want)
		}
	}
}

// TestWhatMakesMasqueradeUnsure: each case changes one thing in the rules of a flow that is
// certainly masqueraded. If the change makes this uncertain, Masquerades must return false.
func TestWhatMakesMasqueradeUnsure(t *testing.T) {
	tests := []struct {
		story, old, new string
		want            bool
	}{
		{"nothing", "", "", true},
		{"kube-proxy's own spelling", "--set-xmark 0x4000/0x4000", "--or-mark 0x00004000", true},
		{"and of the other one", "--set-xmark 0x4000/0x0", "--xor-mark 0x4000", true},
		{"an older kube-proxy clears no mark", "-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n", "", true},
		{"another bit is set", "-j MARK --set-xmark 0x4000/0x4000", "-j MARK --set-xmark 0x8000/0x8000", false},
		{"the bit is flipped, whatever it was", "-j MARK --set-xmark 0x4000/0x4000", "-j MARK --set-xmark 0x4000/0x0", false},
		{"the mark is set behind the DNAT", "-A KUBE-SEP-A1 -s 10.244.1.2/32 -j KUBE-MARK-MASQ\n-A KUBE-SEP-A1 -p tcp -m tcp -j DNAT --to-destination 10.244.1.2:8080\n",
			"-A KUBE-SEP-A1 -p tcp -m tcp -j DNAT --to-destination 10.244.1.2:8080\n-A KUBE-SEP-A1 -s 10.244.1.2/32 -j KUBE-MARK-MASQ\n", false},
		{"it is set in one of two", "-A KUBE-SEP-A1 -s 10.244.1.2/32 -j KUBE", "-A KUBE-SEP-A1 -s 10.244.1.2/32 -m statistic --mode random --probability 0.5 -j KUBE", false},
		{"by an interface", "-A KUBE-SEP-A1 -s 10.244.1.2/32 -j KUBE", "-A KUBE-SEP-A1 -i eth1 -j KUBE", false},
		{"and cleared again", "-A KUBE-SEP-A1 -p tcp", "-A KUBE-SEP-A1 -j MARK --set-xmark 0x0/0x4000\n-A KUBE-SEP-A1 -p tcp", false},
		{"or perhaps by what restores one", "-A KUBE-SEP-A1 -p tcp", "-A KUBE-SEP-A1 -j CONNMARK --restore-mark\n-A KUBE-SEP-A1 -p tcp", false},
		{"another bit is cleared", "-A KUBE-SEP-A1 -p tcp", "-A KUBE-SEP-A1 -j MARK --set-xmark 0x0/0x1\n-A KUBE-SEP-A1 -p tcp", true},
		{"the chain that marks is empty", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n", "", false},
		{"it is none of the generation's", "-s 10.244.1.2/32 -j KUBE-MARK-MASQ", "-s 10.244.1.2/32 -j FOREIGN", false},
		{"another way leads to the same pod unmarked", "-A KUBE-SVC-A -j KUBE-SEP-A2", "-A KUBE-SVC-A -p tcp -j DNAT --to-destination 10.244.1.2:8080\n-A KUBE-SVC-A -j KUBE-SEP-A2", false},
		{"one has an unknown destination", "-A KUBE-SVC-A -j KUBE-SEP-A2", "-A KUBE-SVC-A -p tcp -j DNAT --to-destination 10.244.1.2-10.244.1.9:8080", false},
		{"postrouting is not reached", "-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n", "", false},
		{"what is exempt before", "-A KUBE-POSTROUTING -m mark !", "-A KUBE-POSTROUTING -s 10.244.0.0/16 -d 10.244.0.0/16 -j RETURN\n-A KUBE-POSTROUTING -m mark !", false},
		{"what may be exempt before, by an interface", "-A KUBE-POSTROUTING -m mark !", "-A KUBE-POSTROUTING -o eth1 -j ACCEPT\n-A KUBE-POSTROUTING -m mark !", false},
		{"others are exempt before", "-A KUBE-POSTROUTING -m mark !", "-A KUBE-POSTROUTING -s 10.245.0.0/16 -j RETURN\n-A KUBE-POSTROUTING -m mark !", true},
		{"masquerade on one interface", "-j MASQUERADE --random-fully", "-o eth1 -j MASQUERADE --random-fully", false},
		{"a source that is fixed, perhaps to the one that it has", "-j MASQUERADE --random-fully", "-j SNAT --to-source 10.244.1.2", false},
		{"a source that is fixed to another one", "-j MASQUERADE --random-fully", "-j SNAT --to-source 192.0.2.1", true},
		{"a range of sources", "-j MASQUERADE --random-fully", "-j SNAT --to-source 10.244.1.1-10.244.1.9", false},
		{"another way may lead to the same pod unmarked", "-A KUBE-SVC-A -j KUBE-SEP-A2", "-A KUBE-SVC-A -p tcp -j REDIRECT --to-ports 80\n-A KUBE-SVC-A -j KUBE-SEP-A2", false},
		{"the last rule is gone", "-A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully\n", "", false},
	}
	got, want := map[string]bool{}, map[string]bool{}
	for _, test := range tests {
		if !strings.Contains(masqueradingNat, test.old) {
			t.Fatalf("%s: %q is not in the rules", test.story, test.old)
		}
		text := strings.Replace(masqueradingNat, test.old, test.new, 1)
		got[test.story], want[test.story] = masquerades(t, text, hairpin, "10.96.0.10:80", "10.244.1.2:8080"), test.want
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("surely masqueraded (-want +got):\n%s", diff)
	}
}

// TestAHairpinOfDocker: a container connects to its own published port. Docker's rules test
// addresses, and no mark.
func TestAHairpinOfDocker(t *testing.T) {
	const text = "*nat\n:PREROUTING ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n:DOCKER - [0:0]\n:KUBE-POSTROUTING - [0:0]\n" +
		"-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER\n-A POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A DOCKER -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80\n" +
		"-A KUBE-POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n" +
		"-A KUBE-POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE\nCOMMIT\n"
	for from, want := range map[string]bool{"172.17.0.2:4000": true, "172.17.0.3:4000": false, "192.0.2.9:4000": false} {
		if got := masquerades(t, text, from, "192.0.2.1:8080", "172.17.0.2:80"); got != want {
			t.Errorf("from %s: masqueraded %t, want %t", from, got, want)
		}
	}
}
