package kube

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/rules"
)

// everything reads testdata/everything.yaml and its options.
func everything(t testing.TB) (Objects, Options) {
	t.Helper()
	text, err := os.ReadFile("testdata/everything.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := Decode("testdata/everything.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	o.HostnameOverride = "node-a"
	o.DetectLocalMode = NodeCIDR
	o.MakeIPTablesUtilChains = true
	return objects, o
}

// TestGolden shows the rules for a cluster with services of every kind.
func TestGolden(t *testing.T) {
	g, skips, err := Generate(everything(t))
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "everything.v4.golden", []byte(rules.Render(g, rules.IPv4)))
	golden.Compare(t, "everything.v6.golden", []byte(rules.Render(g, rules.IPv6)))
	var skipped strings.Builder
	for _, s := range skips {
		fmt.Fprintln(&skipped, s)
	}
	golden.Compare(t, "everything.skips.golden", []byte(skipped.String()))
}

// TestOrder passes the objects in many orders and requires the same bytes.
func TestOrder(t *testing.T) {
	render := func(o Objects, options Options) string {
		g, skips, err := Generate(o, options)
		if err != nil {
			t.Fatal(err)
		}
		return rules.Render(g, rules.IPv4) + rules.Render(g, rules.IPv6) + g.ID() + fmt.Sprint(skips)
	}
	check := func(name string, o Objects, options Options) {
		want := render(o, options)
		for seed := range uint64(5) {
			r := rand.New(rand.NewPCG(seed, 0))
			r.Shuffle(len(o.Services), func(i, j int) { o.Services[i], o.Services[j] = o.Services[j], o.Services[i] })
			r.Shuffle(len(o.Slices), func(i, j int) { o.Slices[i], o.Slices[j] = o.Slices[j], o.Slices[i] })
			r.Shuffle(len(o.Nodes), func(i, j int) { o.Nodes[i], o.Nodes[j] = o.Nodes[j], o.Nodes[i] })
			if diff := cmp.Diff(want, render(o, options)); diff != "" {
				t.Fatalf("%s, seed %d: order changes the rules:\n%s", name, seed, diff)
			}
		}
	}
	o, options := everything(t)
	check("everything", o, options)
	for name, c := range corpus(t, "kube-proxy-1.36.3") {
		o, err := Decode(name, c.objects)
		if err != nil {
			t.Fatal(err)
		}
		check(name, o, c.options)
	}
}

// oneService returns a cluster of node-a and a service with an endpoint on it.
func oneService(change func(*Service)) Objects {
	s := newService("ns", "svc", "10.96.0.1")
	s.Spec.Ports = []ServicePort{{Port: 80, NodePort: 30080, Protocol: TCP}}
	s.Spec.Type = TypeNodePort
	if change != nil {
		change(s)
	}
	return Objects{
		Services: []*Service{s},
		Slices: []*EndpointSlice{newSlice("ns", "svc", "1", ServicePort{Port: 8080},
			Endpoint{Addresses: []string{"10.1.0.1"}, NodeName: ptr("node-a")})},
		Nodes: []*Node{newNode("node-a", "z1")},
	}
}

func onNodeA(change func(*Options)) Options {
	o := DefaultOptions()
	o.HostnameOverride = "node-a"
	if change != nil {
		change(&o)
	}
	return o
}

func TestNodePortAddresses(t *testing.T) {
	const last = `-A KUBE-SERVICES%s -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"%s -j KUBE-NODEPORTS`
	everywhere := func(not string) []string {
		return []string{fmt.Sprintf(last, not, " -m addrtype --dst-type LOCAL")}
	}
	on := func(addresses ...string) []string {
		var all []string
		for _, a := range addresses {
			all = append(all, fmt.Sprintf(last, " -d "+a, ""))
		}
		return all
	}
	interfaces := []netip.Addr{
		netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1"), netip.MustParseAddr("192.168.0.9"),
		netip.MustParseAddr("192.168.0.2"), netip.MustParseAddr("192.168.0.2"), netip.MustParseAddr("10.20.30.1"),
		netip.MustParseAddr("fd00:192::2"), netip.MustParseAddr("fe80::1%eth0"),
	}
	for _, c := range []struct {
		name      string
		addresses []string
		localhost bool
		nodeIPs   []string
		family    rules.Family
		want      []string
		localnet  bool
	}{
		{"all", nil, true, nil, rules.IPv4, everywhere(""), true},
		{"all, not on localhost", nil, false, nil, rules.IPv4, everywhere(" ! -d 127.0.0.0/8"), false},
		{"all, IPv6", nil, true, nil, rules.IPv6, everywhere(" ! -d ::1/128"), false},
		{"one network", []string{"192.168.0.0/24"}, true, nil, rules.IPv4, on("192.168.0.2/32", "192.168.0.9/32"), false},
		{"of the other family", []string{"192.168.0.0/24"}, true, nil, rules.IPv6, everywhere(" ! -d ::1/128"), false},
		{"localhost too", []string{"127.0.0.0/8", "10.20.0.0/16"}, true, nil, rules.IPv4, on("10.20.30.1/32", "127.0.0.1/32"), true},
		{"localhost that is not wanted", []string{"127.0.0.1/32", "10.20.0.0/16"}, false, nil, rules.IPv4, on("10.20.30.1/32"), false},
		{"a network without addresses", []string{"172.16.0.0/12"}, true, nil, rules.IPv4, nil, false},
		{"zero network among others", []string{"10.20.0.0/16", "0.0.0.0/0"}, true, nil, rules.IPv4, everywhere(""), true},
		{"IPv6", []string{"fd00::/8", "fe80::/64", "::1/128"}, true, nil, rules.IPv6, on("fd00:192::2/128", "fe80::1/128"), false},
		{"primary", []string{"primary"}, true, []string{"192.168.0.2", "fd00:192::2"}, rules.IPv6, on("fd00:192::2/128"), false},
		{"primary, but unknown", []string{"primary"}, true, []string{"192.168.0.2"}, rules.IPv6, everywhere(" ! -d ::1/128"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			options := onNodeA(func(o *Options) {
				o.NodePortAddresses, o.IPTablesLocalhostNodePorts, o.InterfaceAddrs = c.addresses, c.localhost, interfaces
				for _, ip := range c.nodeIPs {
					o.NodeIPs = append(o.NodeIPs, netip.MustParseAddr(ip))
				}
			})
			got := about(generate(t, oneService(nil), options, c.family, rules.Nat), "-j KUBE-NODEPORTS")
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("KUBE-SERVICES ends (-want +got):\n%s", diff)
			}
			localnet := about(generate(t, oneService(nil), options, c.family, rules.Filter), "block incoming localnet")
			if (len(localnet) > 0) != c.localnet {
				t.Errorf("KUBE-FIREWALL: %q, want a rule: %v", localnet, c.localnet)
			}
		})
	}
}

func TestLocalDetection(t *testing.T) {
	local := oneService(func(s *Service) { s.Spec.ExternalTrafficPolicy = PolicyLocal })
	local.Nodes[0].Spec.PodCIDR = "10.1.0.0/24"
	const svc = `-A KUBE-SVC-VQRITURWPHXFU3HQ%s -p tcp -m comment --comment "ns/svc cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ`
	const ext = `-A KUBE-EXT-VQRITURWPHXFU3HQ%s -m comment --comment "pod traffic for ns/svc external destinations" -j KUBE-SVC-VQRITURWPHXFU3HQ`
	rule := func(masquerade, pods string) []string {
		var all []string
		if pods != "" {
			all = append(all, fmt.Sprintf(ext, pods))
		}
		if masquerade != "" {
			all = append(all, fmt.Sprintf(svc, masquerade))
		}
		return all
	}
	for _, c := range []struct {
		name   string
		change func(*Options)
		want   []string
	}{
		{"none", nil, rule("", "")},
		{"cluster CIDR of two families", func(o *Options) { o.ClusterCIDRs = []string{"fd00::/8", "10.0.0.5/8"} },
			rule(" ! -s 10.0.0.0/8 -d 10.96.0.1/32", " -s 10.0.0.0/8")},
		{"cluster CIDR of the other family", func(o *Options) { o.ClusterCIDRs = []string{"fd00::/8"} }, rule("", "")},
		{"node CIDR", func(o *Options) { o.DetectLocalMode = NodeCIDR }, rule(" ! -s 10.1.0.0/24 -d 10.96.0.1/32", " -s 10.1.0.0/24")},
		{"bridge", func(o *Options) { o.DetectLocalMode, o.PodBridgeInterface = BridgeInterface, "cbr0" },
			rule(" -d 10.96.0.1/32 ! -i cbr0", " -i cbr0")},
		{"prefix", func(o *Options) { o.DetectLocalMode, o.PodInterfaceNamePrefix = InterfaceNamePrefix, "veth" },
			rule(" -d 10.96.0.1/32 ! -i veth+", " -i veth+")},
		{"masquerade all", func(o *Options) {
			o.DetectLocalMode, o.PodInterfaceNamePrefix, o.MasqueradeAll = InterfaceNamePrefix, "veth", true
		}, rule(" -d 10.96.0.1/32", " -i veth+")},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := about(generate(t, local, onNodeA(c.change), rules.IPv4, rules.Nat), "ns/svc cluster IP\" -m tcp --dport 80 -j KUBE-MARK-MASQ", "pod traffic")
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestLargeCluster: the count includes the endpoints of proxied services in one family, ready
// or not.
func TestLargeCluster(t *testing.T) {
	for _, c := range []struct {
		endpoints int
		comments  bool
	}{{1000, true}, {1001, false}} {
		o := oneService(func(s *Service) { s.Spec.SessionAffinity = AffinityClientIP })
		for i := 1; i < c.endpoints; i++ {
			o.Slices[0].Endpoints = append(o.Slices[0].Endpoints, Endpoint{
				Addresses:  []string{fmt.Sprintf("10.2.%d.%d", i>>8, i&0xff)},
				Conditions: EndpointConditions{Ready: ptr(i == 1)},
			})
		}
		lines := generate(t, o, onNodeA(nil), rules.IPv4, rules.Nat)
		got := slices.DeleteFunc(about(lines, "-A KUBE-SVC", "-A KUBE-SEP"), func(l string) bool { return !strings.Contains(l, "--comment") })
		if (len(got) > 0) != c.comments {
			t.Errorf("%d endpoints: comments %q, want any: %v", c.endpoints, got, c.comments)
		}
		if n := len(about(lines, "-A KUBE-SEP")); n != 4 {
			t.Errorf("%d endpoints: %d rules in KUBE-SEP chains, want 4 for the two that are ready", c.endpoints, n)
		}
		if len(about(lines, `--comment "ns/svc cluster IP"`)) == 0 {
			t.Errorf("%d endpoints: KUBE-SERVICES lost its comments", c.endpoints)
		}
	}
}

func TestSourceRanges(t *testing.T) {
	for _, c := range []struct {
		name   string
		ranges []string
		nodeIP string
		want   []string // the sources that KUBE-FW lets in
	}{
		{"the node within", []string{"192.168.0.0/24"}, "192.168.0.2", []string{"192.168.0.0/24", "5.0.6.1/32"}},
		{"the node without", []string{"203.0.113.9/24"}, "192.168.0.2", []string{"203.0.113.0/24"}},
		{"the node unknown", []string{"127.0.0.0/8"}, "", []string{"127.0.0.0/8", "5.0.6.1/32"}},
		{"everybody among others", []string{"203.0.113.0/24", "0.0.0.0/0"}, "", nil},
		{"only of the other family", []string{"2001:db8::/32"}, "", nil},
		{"none that can be read", []string{"203.0.113.0", "x/24", ""}, "", nil},
		{"leading zeros, spaces", []string{" 010.001.000.000/08 "}, "", []string{"10.0.0.0/8"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := oneService(func(s *Service) {
				s.Spec.Type = TypeLoadBalancer
				s.Spec.LoadBalancerSourceRanges = c.ranges
				s.Status.LoadBalancer.Ingress = []LoadBalancerIngress{{IP: "5.0.6.1"}}
			})
			if c.nodeIP != "" {
				o.Nodes[0].Status.Addresses = []NodeAddress{{Type: InternalIP, Address: c.nodeIP}}
			}
			var got []string
			for _, l := range about(generate(t, o, onNodeA(nil), rules.IPv4, rules.Nat), "-A KUBE-FW-") {
				if words := strings.Fields(l); words[2] == "-s" {
					got = append(got, words[3])
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("KUBE-FW lets in (-want +got):\n%s", diff)
			}
			dropped := about(generate(t, o, onNodeA(nil), rules.IPv4, rules.Filter), "-A KUBE-PROXY-FIREWALL")
			if (len(dropped) > 0) != (len(c.want) > 0) {
				t.Errorf("KUBE-PROXY-FIREWALL has %q", dropped)
			}
		})
	}
}
