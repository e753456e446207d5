// Package packets sends real packets through the rules that pkg/rules/kube
// generates. The test's own namespace is the node. Further namespaces are two
// pods and a client outside of the cluster.
//
// It also sends packets through a flush and a replay of the built canaryd.
// Established connections must survive, and connections that began in between
// must be answered in the end.
package packets

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// The places that send and receive packets. far is a pod like near, but according
// to the endpoints it is on another node.
const (
	here   = "node"
	client = "client"
	near   = "near"
	far    = "far"
)

// clients is the number of the client's addresses.
const clients = 24

// subnets are the subnets of the links. The node is number 1 in each.
var subnets = map[string]map[rules.Family]string{
	client: {rules.IPv4: "192.0.2.", rules.IPv6: "2001:db8:1::"},
	near:   {rules.IPv4: "10.244.1.", rules.IPv6: "fd00:244:1::"},
	far:    {rules.IPv4: "10.244.2.", rules.IPv6: "fd00:244:2::"},
}

// gateway returns the node's address on the link to a place.
func gateway(place string, f rules.Family) netip.Addr {
	return netip.MustParseAddr(subnets[place][f] + "1")
}

// address returns the address of a place; for the client its first address.
func address(place string, f rules.Family) netip.Addr {
	switch place {
	case here:
		return gateway(client, f)
	case client:
		return clientAddress(0, f)
	default:
		return netip.MustParseAddr(subnets[place][f] + "2")
	}
}

// clientAddress returns an address of the client by its number. They begin with
// 10.
func clientAddress(number int, f rules.Family) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("%s%d", subnets[client][f], 10+number))
}

// onNode are service addresses that the node itself has.
var onNode = map[rules.Family]string{rules.IPv4: "203.0.113.104/32", rules.IPv6: "2001:db8:2::104/128"}

// A node is the namespace that has the rules, with links to the others.
type node struct {
	*testing.T
	backend iptables.Backend
	objects kube.Objects
	spaces  map[string]int // file descriptors of the namespaces
}

// on runs body on a new node for each backend.
func on(t *testing.T, body func(n *node)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "ip", "iptables-"+string(backend), "ip6tables-"+string(backend))
				body(newNode(t, backend))
			})
		})
	}
}

// perFamily runs body for both families at the same time, and waits. They share
// the node, but no table and no address.
func (n *node) perFamily(name string, body func(t *testing.T, f rules.Family)) {
	n.T.Run(name, func(t *testing.T) {
		for _, f := range rules.Families() {
			t.Run(f.String(), func(t *testing.T) {
				t.Parallel()
				body(t, f)
			})
		}
	})
}

// perProtocol is perFamily for each protocol, too. No two of them share the rules of a service.
func (n *node) perProtocol(name string, body func(t *testing.T, f rules.Family, protocol string)) {
	n.T.Run(name, func(t *testing.T) {
		for _, f := range rules.Families() {
			for _, protocol := range protocols {
				t.Run(f.String()+"/"+protocol, func(t *testing.T) {
					t.Parallel()
					body(t, f, protocol)
				})
			}
		}
	})
}

func newNode(t *testing.T, backend iptables.Backend) *node {
	n := &node{T: t, backend: backend, spaces: map[string]int{}}
	data, err := os.ReadFile("testdata/cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if n.objects, err = kube.Decode("cluster.yaml", data); err != nil {
		t.Fatal(err)
	}
	n.open(here, "/proc/self/ns/net")
	for _, place := range []string{client, near, far} {
		nstest.Command(t, "ip", "netns", "add", place)
		n.open(place, "/run/netns/"+place)
		n.sysctls(place, "ipv4/ip_forward=0", "ipv6/conf/all/forwarding=0", "ipv4/conf/all/rp_filter=2")
	}
	n.sysctls(here, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1",
		// max(all, interface) counts: loose, as systemd sets it.
		"ipv4/conf/all/rp_filter=2",
		// kube-proxy sets this for node ports on localhost.
		"ipv4/conf/all/route_localnet=1",
		// If no rule takes packets for external addresses, they leave by the link
		// on which they arrived. No redirect is to report that to the client.
		"ipv4/conf/all/send_redirects=0", "ipv4/conf/default/send_redirects=0",
		// Each REJECT is to answer, not only a few a second.
		"ipv4/icmp_ratelimit=0", "ipv6/icmp/ratelimit=0")

	var plan strings.Builder // for the node, then for the places
	places := map[string]*strings.Builder{}
	for _, place := range []string{client, near, far} {
		link := "to-" + place
		fmt.Fprintf(&plan, "link add %s type veth peer name eth0 netns %s\nlink set %s up\n", link, place, link)
		places[place] = &strings.Builder{}
		fmt.Fprintln(places[place], "link set eth0 up")
		for _, f := range rules.Families() {
			length, flags := 24, ""
			if f == rules.IPv6 {
				length, flags = 64, " nodad"
			}
			fmt.Fprintf(&plan, "addr add %s/%d dev %s%s\n", gateway(place, f), length, link, flags)
			addresses := []netip.Addr{address(place, f)}
			if place == client {
				for i := 1; i < clients; i++ {
					addresses = append(addresses, clientAddress(i, f))
				}
			}
			for _, a := range addresses {
				fmt.Fprintf(places[place], "addr add %s/%d dev eth0%s\n", a, length, flags)
			}
			fmt.Fprintf(places[place], "route add default via %s\n", gateway(place, f))
		}
	}
	for _, f := range rules.Families() {
		fmt.Fprintf(&plan, "route add default via %s\naddr add %s dev lo\n", address(client, f), onNode[f])
	}
	nstest.CommandInput(t, plan.String(), "ip", "-batch", "-")
	for place, plan := range places {
		nstest.CommandInput(t, plan.String(), "ip", "-n", place, "-batch", "-")
	}
	for _, place := range []string{near, far} {
		for _, f := range rules.Families() {
			n.listen(place, netip.AddrPortFrom(address(place, f), 8080))
		}
	}
	return n
}

func (n *node) open(place, path string) {
	n.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		n.Fatalf("%s: %v", path, err)
	}
	n.spaces[place] = fd
	n.Cleanup(func() { _ = unix.Close(fd) })
}

// in runs do with its thread in the namespace of a place. do's sockets stay
// there.
func (n *node) in(place string, do func()) {
	runtime.LockOSThread()
	if err := unix.Setns(n.spaces[place], unix.CLONE_NEWNET); err != nil {
		panic(fmt.Sprintf("into the namespace of %s: %v", place, err))
	}
	defer func() {
		if err := unix.Setns(n.spaces[here], unix.CLONE_NEWNET); err != nil {
			panic(fmt.Sprintf("back into the node's namespace: %v", err))
		}
		runtime.UnlockOSThread()
	}()
	do()
}

// sysctls sets values of the namespace below /proc/sys/net.
func (n *node) sysctls(place string, settings ...string) {
	n.Helper()
	n.in(place, func() {
		for _, s := range settings {
			name, value, _ := strings.Cut(s, "=")
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
				n.Errorf("%s: %v", place, err)
			}
		}
	})
	if n.Failed() {
		n.FailNow()
	}
}

// options returns the options of a kube-proxy on the node.
func options() kube.Options {
	o := kube.DefaultOptions()
	o.HostnameOverride = "here"
	o.ClusterCIDRs = []string{"10.244.0.0/16", "fd00:244::/32"}
	return o
}

// load generates the rules and restores them into the kernel's empty tables.
func (n *node) load(o kube.Options) {
	n.Helper()
	g, skips, err := kube.Generate(n.objects, o)
	if err != nil || len(skips) > 0 {
		n.Fatalf("generated with %v, skipped %v", err, skips)
	}
	for f := range tableid.ByFamily(g) {
		nstest.CommandInput(n.T, rules.Render(g, f), n.program(f)+"-restore", "-w", "5")
	}
}

func (n *node) program(f rules.Family) string {
	if f == rules.IPv6 {
		return "ip6tables-" + string(n.backend)
	}
	return "iptables-" + string(n.backend)
}

// iptables executes the program of the node's backend.
func (n *node) iptables(t *testing.T, f rules.Family, args ...string) {
	t.Helper()
	nstest.Command(t, n.program(f), append([]string{"-w", "5"}, args...)...)
}

// counters lists the table filter of each family with its counters.
func (n *node) counters() map[rules.Family]string {
	n.Helper()
	all := map[rules.Family]string{}
	for _, f := range rules.Families() {
		all[f] = nstest.Command(n.T, n.program(f)+"-save", "-c", "-t", "filter")
	}
	return all
}

// hits returns the packets counted by listed rules with this comment's beginning,
// these words and this target.
func hits(t *testing.T, listing, comment, words, target string) int {
	t.Helper()
	total := 0
	for line := range strings.Lines(listing) {
		if strings.Contains(line, `--comment "`+comment) && strings.Contains(line, words) && strings.Contains(line, " -j "+target) {
			var packets int
			if _, err := fmt.Sscanf(line, "[%d:", &packets); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			total += packets
		}
	}
	return total
}
