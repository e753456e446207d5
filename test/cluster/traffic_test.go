//go:build cluster

package cluster

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"
)

// A target is an address that clients outside connect to.
type target struct{ name, address string }

var targets = []target{
	{"host port", nodeIPv4 + ":8081"},
	{"node port", nodeIPv4 + ":30080"},
	{"node port, Local", nodeIPv4 + ":30081"},
	{"external IP", externalIPv4 + ":80"},
	{"node port, IPv6", "[" + nodeIPv6 + "]:30080"},
}

// askEvery is the interval between two connections to a target.
const askEvery = 20 * time.Millisecond

// dial connects from the client's namespace, and reads the name of the pod that answers.
func (p *place) dial(ctx context.Context, t target) (conn net.Conn, err error) {
	until := time.Now().Add(answersIn)
	err = p.in(func() error {
		conn, err = (&net.Dialer{Deadline: until, KeepAlive: -1}).DialContext(ctx, "tcp", t.address)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err = conn.SetDeadline(until); err == nil {
		_, err = bufio.NewReader(conn).ReadString('\n')
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// ask returns nil if the target answers.
func (p *place) ask(ctx context.Context, t target) error {
	conn, err := p.dial(ctx, t)
	if err == nil {
		err = conn.Close()
	}
	return err
}

// Traffic has the clients that connect to all targets, and their lasting connections.
type traffic struct {
	stop  context.CancelFunc
	done  sync.WaitGroup
	mu    sync.Mutex
	tries map[target][]try // under mu
	held  map[target]net.Conn
}

// newTraffic starts the clients.
func (n *node) newTraffic() *traffic {
	n.Helper()
	ctx, stop := context.WithCancel(n.Context())
	c := &traffic{stop: stop, tries: map[target][]try{}, held: map[target]net.Conn{}}
	for _, t := range targets {
		conn, err := n.client.dial(ctx, t)
		if err != nil {
			n.Fatalf("%s: %v", t.name, err)
		}
		c.held[t] = conn
		c.done.Go(func() { c.knock(ctx, n.client, t) })
	}
	return c
}

// knock connects to one target again and again.
func (c *traffic) knock(ctx context.Context, from *place, t target) {
	var asked sync.WaitGroup
	defer asked.Wait()
	for tick := time.NewTicker(askEvery); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		asked.Go(func() {
			one := try{at: time.Now()}
			// A connection may finish after the end of the clients.
			one.failed = from.ask(context.WithoutCancel(ctx), t) != nil
			c.mu.Lock()
			defer c.mu.Unlock()
			c.tries[t] = append(c.tries[t], one)
		})
	}
}

// Seen has the clients' observations of one flush.
type seen struct {
	gaps   map[target]time.Duration // the longest span of failed connections
	asked  int
	failed int
	reset  []string // targets whose connection from before is broken
}

// end ends the clients, and returns their observations.
func (c *traffic) end() seen {
	c.stop()
	c.done.Wait()
	s := seen{gaps: map[target]time.Duration{}}
	for t, all := range c.tries {
		slices.SortFunc(all, func(a, b try) int { return a.at.Compare(b.at) })
		s.gaps[t] = longestGap(all)
		for _, one := range all {
			s.asked++
			if one.failed {
				s.failed++
			}
		}
	}
	for t, conn := range c.held {
		if !alive(conn) {
			s.reset = append(s.reset, t.name)
		}
		conn.Close()
	}
	slices.Sort(s.reset)
	return s
}

// alive reports whether a connection still echoes.
func alive(conn net.Conn) bool {
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return false
	}
	if _, err := fmt.Fprintln(conn, "still there?"); err != nil {
		return false
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return err == nil && line == "still there?\n"
}
