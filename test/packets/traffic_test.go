package packets

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// patience limits the wait for a required answer.
	patience = 4 * time.Second
	// silence is the wait in which no answer may arrive. The counter of the rule
	// that dropped the packet proves that it was sent.
	silence = 300 * time.Millisecond
)

var protocols = []string{"tcp", "udp"}

// listen answers at an address of a place, over TCP and UDP, with the name of the
// place and the source address of the question.
func (n *node) listen(place string, at netip.AddrPort) {
	n.Helper()
	var stream net.Listener
	var datagrams *net.UDPConn
	var errs [2]error
	n.in(place, func() {
		stream, errs[0] = net.Listen("tcp", at.String())
		datagrams, errs[1] = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	})
	if err := errors.Join(errs[:]...); err != nil {
		n.Fatalf("listening in %s: %v", place, err)
	}
	var both sync.WaitGroup
	both.Go(func() {
		for {
			c, err := stream.Accept()
			if err != nil {
				return // closed
			}
			_, _ = fmt.Fprintf(c, "%s %s", place, host(c.RemoteAddr()))
			_ = c.Close()
		}
	})
	both.Go(func() {
		for question := make([]byte, 16); ; {
			_, from, err := datagrams.ReadFromUDPAddrPort(question)
			if err != nil {
				return
			}
			_, _ = datagrams.WriteToUDPAddrPort([]byte(place+" "+from.Addr().Unmap().String()), from)
		}
	})
	n.Cleanup(func() {
		_ = stream.Close()
		_ = datagrams.Close()
		both.Wait()
	})
}

func host(a net.Addr) netip.Addr { return netip.MustParseAddrPort(a.String()).Addr().Unmap() }

// The ends of a connection.
const (
	answered = "answered"
	refused  = "refused"
	silent   = "silent"
)

// An outcome is the result of one connection.
type outcome struct {
	End  string
	By   string // the place that answered
	Seen string // the address that it saw: own (the asking place's), node (the node's on its link), or another
}

const own = "own"

// ask opens one connection from a place. The client's number selects its address.
func (n *node) ask(from string, number int, protocol string, to netip.AddrPort, wait time.Duration) (outcome, error) {
	f := rules.IPv6
	if to.Addr().Is4() {
		f = rules.IPv4
	}
	dialer := net.Dialer{Timeout: wait}
	if from == client {
		a := netip.AddrPortFrom(clientAddress(number, f), 0)
		if dialer.LocalAddr = net.TCPAddrFromAddrPort(a); protocol == "udp" {
			dialer.LocalAddr = net.UDPAddrFromAddrPort(a)
		}
	}
	var answer []byte
	var mine netip.Addr
	var err error
	n.in(from, func() {
		var c net.Conn
		if c, err = dialer.Dial(protocol, to.String()); err != nil {
			return
		}
		defer c.Close()
		mine = host(c.LocalAddr())
		listen := func() error { return c.SetReadDeadline(time.Now().Add(wait)) }
		if protocol == "tcp" {
			if err = listen(); err == nil {
				answer, err = io.ReadAll(c)
			}
			return
		}
		// A sender on the node gets an error at once if OUTPUT drops or rejects
		// its packet. The refusal follows only then.
		if _, err = c.Write([]byte("who?")); err != nil && !errors.Is(err, syscall.EPERM) {
			return
		}
		if err = listen(); err == nil {
			answer = make([]byte, 100)
			var length int
			length, err = c.Read(answer)
			answer = answer[:length]
		}
	})
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return outcome{End: refused}, nil
	case isTimeout(err):
		return outcome{End: silent}, nil
	case err != nil:
		return outcome{}, err
	}
	by, seen, found := strings.Cut(string(answer), " ")
	if !found {
		return outcome{}, fmt.Errorf("the answer is %q", answer)
	}
	o := outcome{End: answered, By: by, Seen: seen}
	switch {
	case by != here && seen == gateway(by, f).String():
		o.Seen = here
	case seen == mine.String():
		o.Seen = own
	}
	return o, nil
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// A way is a kind of address of a service.
type way string

const (
	clusterIP    way = "cluster IP"
	nodePort     way = "node port"
	externalIP   way = "external IP"
	loadBalancer way = "load-balancer IP"
)

// destination returns a service's address and port, according to its object.
func (n *node) destination(t *testing.T, f rules.Family, service string, by way, protocol string) netip.AddrPort {
	t.Helper()
	for _, s := range n.objects.Services {
		if s.Name != service {
			continue
		}
		var all []string
		port := s.Spec.Ports[0].Port
		for _, p := range s.Spec.Ports {
			if p.Protocol == strings.ToUpper(protocol) && by == nodePort {
				port = p.NodePort
			}
		}
		switch by {
		case clusterIP:
			all = s.Spec.ClusterIPs
		case nodePort:
			all = []string{address(here, f).String()}
		case externalIP:
			all = s.Spec.ExternalIPs
		case loadBalancer:
			for _, i := range s.Status.LoadBalancer.Ingress {
				all = append(all, i.IP)
			}
		}
		for _, text := range all {
			if a := netip.MustParseAddr(text); a.Is4() == (f == rules.IPv4) {
				return netip.AddrPortFrom(a, uint16(port))
			}
		}
	}
	t.Fatalf("service %s has no %s in %s", service, by, f)
	return netip.AddrPort{}
}

// A table lists the proved facts.
type table struct {
	rows []string
}

func (l *table) add(proof, protocol, from string, to any, result string, took time.Duration) {
	l.rows = append(l.rows, fmt.Sprintf("%s\t%s\t%s -> %v\t%s\t%.1f ms", proof, protocol, from, to, result, float64(took.Microseconds())/1000))
}

// log prints the table.
func (l *table) log(t *testing.T) {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "PROVED (%d)\tPROTOCOL\tPACKETS\tRESULT\tTOOK\n%s\n", len(l.rows), strings.Join(l.rows, "\n"))
	_ = w.Flush()
	t.Log("\n" + b.String())
}
