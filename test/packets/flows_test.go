package packets

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "4"); err != nil { // they wait for packets that never arrive
		panic(err)
	}
	os.Exit(nodetest.Main(m))
}

const (
	// answersIn limits the wait for a required answer. silentFor is the wait for
	// a forbidden one.
	answersIn = 15 * time.Second
	silentFor = 400 * time.Millisecond
	again     = 100 * time.Millisecond // between two questions of one client
	// lonely is the service that has only one pod.
	lonely = 3
)

// A lab is a node with a cluster around it.
type lab struct {
	*nodetest.Node
	*cluster.Cluster
}

func inCluster(t *testing.T, body func(l *lab)) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "ip")
		c, err := cluster.New(n.Context(), 4)
		n.Must(err)
		c.Shrink(lonely)
		wait, err := c.Serve(n.Context())
		n.Must(err)
		n.Cleanup(wait) // the test's context has ended by then
		l := &lab{n, c}
		l.putBack()
		body(l)
	})
}

// putBack writes the rules again, as their owner would.
func (l *lab) putBack() {
	l.Helper()
	text, err := l.Rules()
	l.Must(err)
	l.Must(l.Programs.RestoreNoflush(l.Context(), rules.IPv4, text))
}

// dial opens a socket of the client that keeps its port.
func (l *lab) dial(network string, to netip.AddrPort) net.Conn {
	l.Helper()
	var c net.Conn
	l.Must(l.In(cluster.Client, func() error {
		var err error
		c, err = net.DialTimeout(network, to.String(), answersIn)
		return err
	}))
	l.Cleanup(func() { _ = c.Close() })
	return c
}

// answer sends questions over UDP until a pod answers, and returns the pod.
func (l *lab) answer(what string, c net.Conn) (pod string) {
	l.Helper()
	testkit.Until(l, "an answer, "+what, func() (err error) {
		pod, err = l.ask(c)
		return err
	})
	return pod
}

// ask sends one question over UDP, and returns the answer.
func (l *lab) ask(c net.Conn) (string, error) {
	l.Helper()
	answer := make([]byte, 100)
	_, _ = c.Write([]byte("?")) // if no listener has the port, the next write fails
	l.Must(c.SetReadDeadline(time.Now().Add(again)))
	n, err := c.Read(answer)
	return string(answer[:n]), err
}

func (l *lab) wantAnswer(what string, c net.Conn, from ...netip.Addr) {
	l.Helper()
	got := l.answer(what, c)
	if !strings.Contains(fmt.Sprint(from), got) || got == "" {
		l.Errorf("%s: %q answers, want one of %v", what, got, from)
	}
}

func (l *lab) wantSilence(what string, c net.Conn) {
	l.Helper()
	testkit.Stays(l, silentFor, "that nothing answers, "+what, func() error {
		if got, err := l.ask(c); err == nil {
			return fmt.Errorf("%s answers", got)
		}
		return nil
	})
}

// A stream is an established TCP connection.
type stream struct {
	net.Conn
	in  *bufio.Reader
	pod string
}

func (l *lab) stream(to netip.AddrPort) *stream {
	l.Helper()
	c := l.dial("tcp4", to)
	s := &stream{Conn: c, in: bufio.NewReader(c)}
	s.pod = l.line(s)
	return s
}

func (l *lab) line(s *stream) string {
	l.Helper()
	l.Must(s.SetReadDeadline(time.Now().Add(answersIn)))
	text, err := s.in.ReadString('\n')
	if err != nil {
		l.Errorf("the connection to %s: %v", s.RemoteAddr(), err)
	}
	return strings.TrimSpace(text)
}

// wantAlive fails unless the same pod goes on answering.
func (l *lab) wantAlive(when string, all ...*stream) {
	l.Helper()
	for _, s := range all {
		if _, err := s.Write([]byte("?")); err != nil {
			l.Errorf("%s: %v", when, err)
			continue
		}
		if got := l.line(s); got != s.pod {
			l.Errorf("%s: %s answers the connection to %s, which was %s's", when, got, s.RemoteAddr(), s.pod)
		}
	}
}

// tracked reports whether conntrack holds the flow that began at the socket's
// port.
func (l *lab) tracked(c net.Conn) bool {
	l.Helper()
	flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	l.Must(err)
	from, to := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())
	for _, f := range flows {
		if f.Forward.SrcPort == from.Port() && f.Forward.DstPort == to.Port() && f.Forward.DstIP.String() == to.Addr().String() {
			return true
		}
	}
	return false
}

func (l *lab) flushNat() {
	l.Helper()
	l.Must(l.Programs.Flush(l.Context(), rules.IPv4, rules.Nat, ""))
}

// TestWithoutCanarydAFlowOfTheOutageStaysDeaf shows why canaryd must act. The
// owner has put the rules back. A client that kept its port still gets no answer,
// but a new client does.
func TestWithoutCanarydAFlowOfTheOutageStaysDeaf(t *testing.T) {
	inCluster(t, func(l *lab) {
		l.flushNat()
		meanwhile := l.dial("udp4", cluster.DNS())
		l.Until("conntrack to know the flow of the outage", func() error {
			l.wantSilence("during the outage", meanwhile)
			if !l.tracked(meanwhile) {
				return errors.New("it does not")
			}
			return nil
		})
		l.putBack()
		l.wantAnswer("a new client", l.dial("udp4", cluster.DNS()), l.Endpoints(0)...)
		l.wantSilence("the client of the outage", meanwhile)
	})
}

// TestFlowsThroughAFlush: after the replay the clients of the outage must get
// answers at the ports that they kept. Established connections must continue,
// also during the outage. A flow to another address must stay unchanged.
func TestFlowsThroughAFlush(t *testing.T) {
	inCluster(t, func(l *lab) {
		d := l.Start()
		streams := []*stream{l.stream(cluster.Service(0)), l.stream(cluster.Service(1)), l.stream(cluster.HostPort(0))}
		before := l.dial("udp4", cluster.DNS())
		pod := l.answer("before the flush", before)
		stranger := l.dial("udp4", cluster.Stranger)
		l.wantSilence("the stranger", stranger)

		d.Suspend() // extends the outage for as long as the test needs
		l.flushNat()
		dns, port := l.dial("udp4", cluster.DNS()), l.dial("udp4", cluster.HostPort(1))
		other := l.dial("udp4", netip.AddrPortFrom(cluster.Service(2).Addr(), 54)) // no port of the service
		l.wantSilence("DNS during the outage", dns)
		l.wantSilence("the host port during the outage", port)
		l.wantSilence("another port of a service", other)
		l.wantAlive("during the outage", streams...)
		if got := l.answer("during the outage", before); got != pod {
			l.Errorf("during the outage %q answers the established flow, which was %s's", got, pod)
		}
		for what, c := range map[string]net.Conn{"DNS": dns, "the host port": port, "another port": other, "the stranger": stranger} {
			if !l.tracked(c) {
				l.Fatalf("conntrack does not know the flow to %s: nothing would be shown", what)
			}
		}
		d.Signal(syscall.SIGCONT)
		l.Healed(1)

		l.wantAnswer("DNS after the replay", dns, l.Endpoints(0)...)
		l.wantAnswer("the host port after the replay", port, cluster.HostPod(1))
		l.wantAlive("after the replay", streams...)
		if got := l.answer("after the replay", before); got != pod {
			l.Errorf("after the replay %q answers the established flow, which was %s's", got, pod)
		}
		for what, c := range map[string]net.Conn{"another port of a service": other, "the stranger": stranger} {
			if !l.tracked(c) {
				l.Errorf("the flow to %s is gone from conntrack", what)
			}
		}
		var got map[string]float64
		l.Until("the sweep to be counted", func() error {
			if got = l.Metrics(); nodetest.Sum(got, "conntrack_deleted_total")+nodetest.Sum(got, "conntrack_errors_total") < 2 {
				return errors.New("less than two flows are")
			}
			return nil
		})
		if n := nodetest.Sum(got, "conntrack_deleted_total", `family="ipv4"`, `protocol="udp"`); n != 2 {
			l.Errorf("%v flows of UDP were deleted, want those of DNS and the host port", n)
		}
		if n := nodetest.Sum(got, "conntrack_deleted_total") + nodetest.Sum(got, "conntrack_errors_total"); n != 2 {
			l.Errorf("%v flows deleted and errors in all, want 2", n)
		}
		d.WantLog("Ended flows that began while the rules were missing", "udp=2")
	})
}
