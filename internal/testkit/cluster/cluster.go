// Package cluster makes a cluster to send packets through. The namespace of the process is the
// node. Three more hold the pods that answer, the pods that only send requests, and a client
// outside. Each answer names the pod that sent it.
//
// [New] makes the namespaces, and [Cluster.Rules] returns the rules of its services. [Cluster.In]
// runs a function in one of the namespaces. [Service], [NodePort] and [HostPort] return the
// addresses to send to.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// The namespaces besides the node's.
const (
	Client  = "client"
	Callers = "callers" // pods that send requests and serve nothing
	Pods    = "pods"    // a pod here gets an answer only if its request is masqueraded
)

// maxServices is the largest number of services of a cluster. Each service has one pod in each
// of two networks of 16,384 addresses.
const maxServices = 10000

// Each cluster also has these.
const (
	HostPorts = 2 // pods with a port of the node
	NodePorts = 2 // services with a node port
	Hairpins  = 2 // services whose only pod may send requests to them
	// datagramServices bounds the services that also serve UDP.
	datagramServices = 4
)

// node is the node's address on its link to the client.
var node = netip.MustParseAddr("192.0.2.1")

// nth returns address 10+n of a network.
func nth(network string, n int) netip.Addr {
	first := netip.MustParseAddr(network).As4()
	n += 10
	return netip.AddrFrom4([4]byte{first[0], first[1], first[2] + byte(n>>8), byte(n)})
}

// Service returns the address of a service.
func Service(i int) netip.AddrPort { return netip.AddrPortFrom(nth("10.96.0.0", i), 80) }

// Datagrams returns the UDP address of a service with that TCP address. A cluster IP has another
// port for UDP; the node's ports are the same.
func Datagrams(at netip.AddrPort) netip.AddrPort {
	if at.Addr() == node {
		return at
	}
	return netip.AddrPortFrom(at.Addr(), 53)
}

// DNS returns the UDP address of the first service.
func DNS() netip.AddrPort { return Datagrams(Service(0)) }

// HostPort returns the address of a host port, over TCP and UDP.
func HostPort(i int) netip.AddrPort { return netip.AddrPortFrom(node, uint16(8081+i)) }

// NodePort returns the address of a service with a node port, over TCP and UDP.
func NodePort(i int) netip.AddrPort { return netip.AddrPortFrom(node, uint16(30080+i)) }

// Hairpin returns the address of a service with one pod.
func Hairpin(i int) netip.AddrPort { return netip.AddrPortFrom(nth("10.98.0.0", i), 80) }

// Stranger is an address outside the cluster that no host has.
var Stranger = netip.MustParseAddrPort("198.51.100.9:53")

// pod returns one of the first two pods of service i.
func pod(i, replica int) netip.Addr {
	return nth([]string{"10.244.64.0", "10.244.128.0"}[replica], i)
}

// HostPod returns the pod of a host port.
func HostPod(i int) netip.Addr { return nth("10.244.3.0", i) }

// NodePortPods returns the pods of a service with a node port.
func NodePortPods(i int) []netip.Addr {
	return []netip.Addr{nth("10.244.5.0", i), nth("10.244.6.0", i)}
}

// HairpinPod returns the only pod of a service.
func HairpinPod(i int) netip.Addr { return nth("10.244.7.0", i) }

// The ports on which each pod listens.
const (
	streams   = 8080
	datagrams = 5353
)

// A Cluster is made by New. Its namespaces end with the process's own.
type Cluster struct {
	services int
	spaces   map[string]int // file descriptors
	// endpoints are the pods of each service.
	endpoints [][]netip.Addr
}

// New makes the namespaces, links and addresses around the namespace of the process, which must
// be new and have its own /run.
func New(ctx context.Context, services int) (*Cluster, error) {
	if services < 2 || services > maxServices {
		return nil, fmt.Errorf("%d services: a cluster has 2 to %d", services, maxServices)
	}
	c := &Cluster{services: services, spaces: map[string]int{}}
	for i := range services {
		c.endpoints = append(c.endpoints, []netip.Addr{pod(i, 0), pod(i, 1)})
	}
	self, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the node's namespace: %w", err)
	}
	c.spaces[""] = self
	for _, place := range []string{Client, Callers, Pods} {
		if err := ip(ctx, "", "netns", "add", place); err != nil {
			return nil, err
		}
		if c.spaces[place], err = unix.Open("/run/netns/"+place, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("opening the namespace of %s: %w", place, err)
		}
	}
	return c, errors.Join(c.wire(ctx), c.tune())
}

// wire makes links, addresses and routes. Packets that no rule translates leave by the uplink,
// where they are lost without an answer. All pods that answer have one next hop, because a
// kernel does not keep 10,000 neighbours.
func (c *Cluster) wire(ctx context.Context) error {
	var here strings.Builder
	fmt.Fprintf(&here, "link add uplink type veth peer name sink netns %s\nlink set uplink up\naddr add 203.0.113.2/24 dev uplink\n", Pods)
	for place, network := range map[string]string{Client: "192.0.2.1/24", Callers: "10.244.4.1/24", Pods: "10.244.0.1/24"} {
		fmt.Fprintf(&here, "link add to-%s type veth peer name eth0 netns %s\nlink set to-%s up\naddr add %s dev to-%s\n", place, place, place, network, place)
	}
	// No interface has the gateway's hardware address.
	here.WriteString("neigh add 203.0.113.1 lladdr 02:00:00:00:00:01 dev uplink\nroute add default via 203.0.113.1\nroute add 10.244.0.0/16 via 10.244.0.2\n")
	const client = "link set eth0 up\naddr add 192.0.2.9/24 dev eth0\nroute add default via 192.0.2.1\n"
	const callers = "link set eth0 up\naddr add 10.244.4.2/24 dev eth0\nroute add default via 10.244.4.1\n"
	pods := "link set lo up\nlink set sink up\nlink set eth0 up\naddr add 10.244.0.2/24 dev eth0\nroute add default via 10.244.0.1\n"
	for _, network := range []string{"10.244.3.0/24", "10.244.5.0/24", "10.244.6.0/24", "10.244.7.0/24", "10.244.64.0/18", "10.244.128.0/18"} {
		pods += "route add local " + network + " dev lo\n"
	}
	return errors.Join(ip(ctx, here.String(), "-batch", "-"), ip(ctx, pods, "-n", Pods, "-batch", "-"),
		ip(ctx, client, "-n", Client, "-batch", "-"), ip(ctx, callers, "-n", Callers, "-batch", "-"))
}

// tune sets kernel settings as on a node.
func (c *Cluster) tune() error {
	set := func(place string, settings ...string) error {
		return c.In(place, func() error {
			for _, s := range settings {
				name, value, _ := strings.Cut(s, "=")
				if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
					return fmt.Errorf("in %s: %w", place, err)
				}
			}
			return nil
		})
	}
	ports := "ipv4/ip_local_port_range=10000 60000"
	return errors.Join(
		set("", "ipv4/ip_forward=1", "ipv4/conf/all/rp_filter=2", "ipv4/conf/all/send_redirects=0",
			"ipv4/conf/to-client/send_redirects=0", "ipv4/conf/to-callers/send_redirects=0", "ipv4/conf/to-pods/send_redirects=0"),
		set(Client, ports), set(Callers, ports), set(Pods, ports))
}

// In runs do on a thread in the namespace of a place; "" is the node. Sockets and processes
// that do creates stay there.
func (c *Cluster) In(place string, do func() error) error {
	runtime.LockOSThread()
	if err := unix.Setns(c.spaces[place], unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("entering the namespace of %q: %w", place, err)
	}
	defer func() {
		// Without a way back the thread stays locked, and ends with its goroutine.
		if err := unix.Setns(c.spaces[""], unix.CLONE_NEWNET); err == nil {
			runtime.UnlockOSThread()
		}
	}()
	return do()
}

func ip(ctx context.Context, input string, args ...string) error {
	cmd := exec.CommandContext(ctx, "ip", args...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
