// Package cluster is a cluster to send packets through: the namespace that the
// process is in is the node, one more holds the pods that answer, one the pods
// that only ask, and one a client outside. Every answer says which pod gave it.
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
	Callers = "callers" // pods that ask and serve nothing
	Pods    = "pods"    // a pod among them that asks is answered only by a masqueraded way
)

// MostServices is how many services a cluster can have: each has a pod in
// either of two networks of 16,384 addresses.
const MostServices = 10000

// What every cluster has besides.
const (
	HostPorts = 2 // pods with a port of the node
	NodePorts = 2 // services with a node port
	Hairpins  = 2 // services whose only pod may ask them
	// datagramServices bounds the services that are found over UDP too.
	datagramServices = 4
)

// node is the node's address on its link to the client.
var node = netip.MustParseAddr("192.0.2.1")

// nth returns the address that lies n behind the tenth of a network.
func nth(network string, n int) netip.Addr {
	first := netip.MustParseAddr(network).As4()
	n += 10
	return netip.AddrFrom4([4]byte{first[0], first[1], first[2] + byte(n>>8), byte(n)})
}

// Service returns where a service is found.
func Service(i int) netip.AddrPort { return netip.AddrPortFrom(nth("10.96.0.0", i), 80) }

// Datagrams returns where a service is found over UDP that is found over TCP at
// that address. A cluster IP has another port for it, and the node has not.
func Datagrams(at netip.AddrPort) netip.AddrPort {
	if at.Addr() == node {
		return at
	}
	return netip.AddrPortFrom(at.Addr(), 53)
}

// DNS returns where the first service is found over UDP.
func DNS() netip.AddrPort { return Datagrams(Service(0)) }

// HostPort returns where the pod of a host port is found, over TCP and UDP.
func HostPort(i int) netip.AddrPort { return netip.AddrPortFrom(node, uint16(8081+i)) }

// NodePort returns where a service with a node port is found, over TCP and UDP.
func NodePort(i int) netip.AddrPort { return netip.AddrPortFrom(node, uint16(30080+i)) }

// Hairpin returns where a service of one pod is found.
func Hairpin(i int) netip.AddrPort { return netip.AddrPortFrom(nth("10.98.0.0", i), 80) }

// Stranger is an address beyond the node at which nobody is.
var Stranger = netip.MustParseAddrPort("198.51.100.9:53")

// pod returns one of the two pods that service i begins with.
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

// The ports that every pod listens on.
const (
	streams   = 8080
	datagrams = 5353
)

// A Cluster is what New made. Its namespaces go away with the process's own.
type Cluster struct {
	services int
	spaces   map[string]int // file descriptors
	// endpoints are the pods of each service.
	endpoints [][]netip.Addr
}

// New makes the namespaces, links and addresses around the namespace that the
// process is in, which must be new, and have a /run of its own.
func New(ctx context.Context, services int) (*Cluster, error) {
	if services < 2 || services > MostServices {
		return nil, fmt.Errorf("%d services: a cluster has 2 to %d", services, MostServices)
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

// wire makes links, addresses and routes. What no rule translates leaves by the
// uplink, at the other end of which nobody takes it: it is lost without an answer.
// All pods that answer stand behind one address, for 10,000 neighbours are more
// than a kernel keeps.
func (c *Cluster) wire(ctx context.Context) error {
	var here strings.Builder
	fmt.Fprintf(&here, "link add uplink type veth peer name sink netns %s\nlink set uplink up\naddr add 203.0.113.2/24 dev uplink\n", Pods)
	for place, network := range map[string]string{Client: "192.0.2.1/24", Callers: "10.244.4.1/24", Pods: "10.244.0.1/24"} {
		fmt.Fprintf(&here, "link add to-%s type veth peer name eth0 netns %s\nlink set to-%s up\naddr add %s dev to-%s\n", place, place, place, network, place)
	}
	// Nobody has the gateway's hardware address.
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

// tune sets what a node has set.
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

// In runs do with its thread in the namespace of a place; empty is the node.
// Sockets and processes that it makes stay there.
func (c *Cluster) In(place string, do func() error) error {
	runtime.LockOSThread()
	if err := unix.Setns(c.spaces[place], unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("into the namespace of %q: %w", place, err)
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
