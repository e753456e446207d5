package packets

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
)

const (
	// pingEvery is the time between two questions.
	pingEvery = 5 * time.Millisecond
	// pingLimit is the time without an answer after which a connection counts as
	// dead.
	pingLimit = 3 * time.Second
)

// A pinger sends questions over one established connection for as long as it
// lives.
type pinger struct {
	lab  *lab
	kind string
	conn net.Conn
	pod  string // the pod that answered first

	longest time.Duration // the longest time for an answer
	end     string        // the reason of an early end, "" if there was none
}

// The ends of an established connection, besides refused.
const (
	reset = "reset"
	dead  = "dead"
)

// pingers are connections of every kind that nat rules make.
type pingers struct {
	all  []*pinger
	stop context.CancelFunc
	done sync.WaitGroup
}

// establish opens each kind of connection several times and lets it ping. The
// kinds are to a host port (DNAT), to a cluster IP from outside (DNAT and
// masquerading), and from the node itself (translated at OUTPUT).
func (l *lab) establish(each int) *pingers {
	l.Helper()
	ctx, stop := context.WithCancel(l.Context())
	p := &pingers{stop: stop}
	add := func(kind, place, network string, to netip.AddrPort) {
		for range each {
			p.all = append(p.all, &pinger{lab: l, kind: network + " " + kind, conn: l.dialFrom(place, network, to)})
		}
	}
	add("host port", cluster.Client, "tcp4", cluster.HostPort(0))
	add("cluster IP, masqueraded", cluster.Client, "tcp4", cluster.Service(0))
	add("cluster IP, from the node", "", "tcp4", cluster.Service(1))
	add("host port", cluster.Client, "udp4", cluster.HostPort(1))
	add("cluster IP, masqueraded", cluster.Client, "udp4", cluster.DNS())
	for _, one := range p.all {
		p.done.Go(func() { one.run(ctx) })
	}
	l.Cleanup(func() { p.finish() })
	testkit.Pass(l, 20*pingEvery, "that each has pinged some times before the story goes on")
	return p
}

// dialFrom is dial from any place.
func (l *lab) dialFrom(place, network string, to netip.AddrPort) net.Conn {
	l.Helper()
	var c net.Conn
	l.Must(l.In(place, func() error {
		var err error
		c, err = net.DialTimeout(network, to.String(), answersIn)
		return err
	}))
	l.Cleanup(func() { _ = c.Close() })
	return c
}

// finish stops all pinging, and returns when it has ended.
func (p *pingers) finish() {
	p.stop()
	p.done.Wait()
}

// run pings until ctx or the connection ends.
func (p *pinger) run(ctx context.Context) {
	in := bufio.NewReader(p.conn)
	stream := strings.HasPrefix(p.kind, "tcp")
	pause := time.NewTicker(pingEvery)
	defer pause.Stop()
	for asked := !stream; ctx.Err() == nil; asked = true { // a pod greets a new client
		start := time.Now()
		who, err := p.ask(in, asked)
		p.longest = max(p.longest, time.Since(start))
		switch {
		case err == nil && p.pod == "":
			p.pod = who
		case err == nil && who != p.pod:
			p.end = "answered by another pod"
			return
		case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
			p.end = reset
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			p.end = dead
			return
		case err != nil:
			p.end = err.Error()
			return
		}
		<-pause.C
	}
}

// ask sends one question, over UDP as often as necessary.
func (p *pinger) ask(in *bufio.Reader, ask bool) (string, error) {
	if strings.HasPrefix(p.kind, "udp") {
		return p.askDatagrams()
	}
	if err := p.conn.SetDeadline(time.Now().Add(pingLimit)); err != nil {
		return "", err
	}
	if ask {
		if _, err := p.conn.Write([]byte("?")); err != nil {
			return "", err
		}
	}
	return in.ReadString('\n')
}

func (p *pinger) askDatagrams() (string, error) {
	answer := make([]byte, 100)
	pause := time.NewTicker(pingEvery)
	defer pause.Stop()
	for range testkit.During(p.lab, pingLimit, "how long a connection without an answer lives") {
		_ = p.conn.SetDeadline(time.Now().Add(4 * pingEvery))
		_, err := p.conn.Write([]byte("?"))
		n := 0
		if err == nil {
			n, err = p.conn.Read(answer)
		}
		switch {
		case err == nil:
			return string(answer[:n]), nil
		case errors.Is(err, unix.ECONNREFUSED):
			p.end = refused // the node's own stack has seen the packet
			<-pause.C
		}
	}
	return "", os.ErrDeadlineExceeded
}

// ended returns how many connections ended, or were refused, by kind and end. It
// also returns the longest time for an answer among the others.
func (p *pingers) ended() (ends map[string]int, longest time.Duration) {
	ends = map[string]int{}
	for _, one := range p.all {
		if one.end != "" {
			ends[one.kind+": "+one.end]++
		} else {
			longest = max(longest, one.longest)
		}
	}
	return ends, longest
}

// summary returns the ends in one line.
func (p *pingers) summary() string {
	ends, longest := p.ended()
	var lines []string
	for kind, n := range ends {
		lines = append(lines, fmt.Sprintf("%s %d", kind, n))
	}
	slices.Sort(lines)
	if len(lines) == 0 {
		lines = []string{"all alive"}
	}
	return fmt.Sprintf("%s; longest %s", strings.Join(lines, ", "), longest.Round(time.Millisecond))
}
