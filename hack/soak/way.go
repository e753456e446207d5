package main

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/cluster"
)

// A way is one kind of connection: its translation and its protocol.
type way struct {
	Name    string
	Network string // tcp4 or udp4
	Place   string // the namespace of the clients
	Targets []target
}

// A target is the destination of a connection.
type target struct {
	At    netip.AddrPort
	From  netip.Addr // the source, a pod's address; with the zero Addr the kernel chooses
	Owner int        // the index in truth of the pods that may answer
}

func (w way) String() string {
	if w.Network == "udp4" {
		return w.Name + ", UDP"
	}
	return w.Name + ", TCP"
}

// maxTargets is how many services one way uses. They are spread over all services, because the
// rule of the last service is far behind that of the first.
const maxTargets = 16

// ways returns all kinds of connections of this node, over TCP and UDP. kube-proxy masquerades
// all traffic from outside of the pods' network, except to host ports.
func (l *lab) ways() []way {
	var streams, datagrams, nodePorts, hostPorts, hairpins []target
	n := l.Cluster.Services()
	for i := range min(n, maxTargets) {
		owner := i * n / min(n, maxTargets)
		streams = append(streams, target{At: cluster.Service(owner), Owner: owner})
	}
	for i := range l.DatagramServices() {
		datagrams = append(datagrams, target{At: cluster.Service(i), Owner: i})
	}
	for i := range cluster.HostPorts {
		hostPorts = append(hostPorts, target{At: cluster.HostPort(i), Owner: n + i})
	}
	for i := range cluster.NodePorts {
		nodePorts = append(nodePorts, target{At: cluster.NodePort(i), Owner: n + cluster.HostPorts + i})
	}
	for i := range cluster.Hairpins {
		hairpins = append(hairpins, target{At: cluster.Hairpin(i), From: cluster.HairpinPod(i), Owner: n + cluster.HostPorts + cluster.NodePorts + i})
	}
	var all []way
	add := func(name, place string, tcp, udp []target) {
		all = append(all, way{name, "tcp4", place, tcp})
		other := way{name, "udp4", place, nil}
		for _, t := range udp {
			t.At = cluster.Datagrams(t.At)
			other.Targets = append(other.Targets, t)
		}
		all = append(all, other)
	}
	add("cluster IP from outside", cluster.Client, streams, datagrams)
	add("node port", cluster.Client, nodePorts, nodePorts)
	add("hairpin", cluster.Pods, hairpins, hairpins)
	if l.ForwardDrop {
		return all // kube-proxy does not mark the rest, so a policy of DROP stops it
	}
	add("cluster IP from a pod", cluster.Callers, streams, datagrams)
	add("host port", cluster.Client, hostPorts, hostPorts)
	return all
}

// askAgain is how long a UDP client waits before it repeats its request.
const askAgain = 200 * time.Millisecond

// dial opens a socket and connects it.
func (w way) dial(t target, limit time.Duration) (net.Conn, error) {
	dialer := net.Dialer{Timeout: limit, Control: chooseLate}
	if w.Network == "udp4" {
		from := t.From
		if !from.IsValid() {
			from = netip.IPv4Unspecified()
		}
		for {
			dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, datagramPort()))
			if conn, err := dialer.Dial(w.Network, t.At.String()); !errors.Is(err, unix.EADDRINUSE) {
				return conn, err
			}
		}
	}
	if t.From.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(t.From, 0))
	}
	return dialer.Dial(w.Network, t.At.String())
}

// datagrams counts the ports that datagramPort has returned.
var datagrams atomic.Uint32

// datagramPort returns the next port of a UDP client. The kernel would choose one at random. In
// conntrack a port keeps its pod for 30 s (nf_conntrack_udp_timeout), even after the service
// has lost that pod. kube-proxy deletes such entries, but this program's changes of services do
// not. A process begins a hundred ports further for each second of the clock, and never sends
// as many requests.
func datagramPort() uint16 {
	const first, ports, eachSecond = 32768, 28000, 100
	begun.Do(func() { datagrams.Store(uint32(clock() / (1_000_000 / eachSecond) % ports)) })
	return uint16(first + datagrams.Add(1)%ports)
}

var begun sync.Once

// chooseLate makes the kernel choose a port when it connects, even if an address was bound
// before. It chooses in ascending order for ten seconds (Linux 5.18 and later), and then
// continues from another port. conntrack may still have a port from a connection that failed a
// minute ago, and would more often if each port were random.
func chooseLate(_, _ string, raw syscall.RawConn) error {
	var failed error
	err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	})
	return errors.Join(err, failed)
}

// try opens one connection and waits for one answer.
func (w way) try(t target, limit time.Duration) attempt {
	a := attempt{Start: clock(), Target: t.Owner, Outcome: other}
	deadline := time.Now().Add(limit)
	conn, err := w.dial(t, limit)
	if err != nil {
		a.Outcome, a.End = outcome(err), clock()
		return a
	}
	defer conn.Close()
	var text string
	if w.Network == "udp4" {
		text, err = askUntil(conn, deadline)
	} else {
		_ = conn.(*net.TCPConn).SetLinger(0) // if that fails, the connection just ends later
		_ = conn.SetDeadline(deadline)
		text, err = readLine(conn)
	}
	a.End = clock()
	switch {
	case errors.Is(err, syscall.ECONNRESET):
		a.Outcome = reset
	case err != nil:
		a.Outcome = outcome(err)
	default:
		if a.Pod, err = netip.ParseAddr(text); err == nil {
			a.Outcome = answered
		}
	}
	return a
}

// askUntil sends requests over UDP, repeatedly from the same port. It ignores refusals, like a
// client that repeats its request.
func askUntil(conn net.Conn, deadline time.Time) (string, error) {
	answer := make([]byte, 64)
	for {
		next := time.Now().Add(askAgain)
		if next.After(deadline) {
			next = deadline
		}
		_, _ = conn.Write([]byte("?")) // an error is about an earlier request
		_ = conn.SetReadDeadline(next)
		n, err := conn.Read(answer)
		for errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(next) {
			n, err = conn.Read(answer)
		}
		if err == nil || !time.Now().Before(deadline) {
			return string(answer[:n]), err
		}
	}
}

// readLine reads a pod's answer over TCP, which is one short line.
func readLine(conn net.Conn) (string, error) {
	answer := make([]byte, 64)
	for n := 0; ; {
		more, err := conn.Read(answer[n:])
		if n += more; n > 0 && answer[n-1] == '\n' {
			return strings.TrimSpace(string(answer[:n])), nil
		}
		if err != nil {
			return "", err
		}
	}
}
