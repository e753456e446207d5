package serve

import (
	"net"
	"net/http"
	"slices"
	"sync"
)

// A crowd is a listener with a bounded number of connections. Any local user may connect to the
// loopback address, but canaryd must still answer probes and scrapes. So a new connection never
// waits for a connection without a request: if there are too many, the oldest of these is
// closed.
type crowd struct {
	net.Listener
	most int

	mu      sync.Mutex
	room    *sync.Cond        // signalled when a connection ends
	silent  []*crowdedConn    // connections without a request yet, oldest first
	talking map[net.Conn]bool // connections with a request, which last as long as the answer
	closed  bool
}

// A crowdedConn is a connection of a crowd.
type crowdedConn struct {
	net.Conn
	crowd *crowd
}

// newCrowd returns l with at most most connections at a time.
func newCrowd(l net.Listener, most int) *crowd {
	c := &crowd{Listener: l, most: most, talking: map[net.Conn]bool{}}
	c.room = sync.NewCond(&c.mu)
	return c
}

// Accept returns the next connection. If there are too many, it closes the oldest one that has
// sent no request. It waits only while all allowed connections are busy with requests.
func (c *crowd) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	made := &crowdedConn{Conn: conn, crowd: c}
	c.mu.Lock()
	for len(c.talking) >= c.most && !c.closed {
		c.room.Wait()
	}
	var evicted *crowdedConn
	if len(c.silent)+len(c.talking) >= c.most && len(c.silent) > 0 {
		evicted, c.silent = c.silent[0], c.silent[1:]
	}
	c.silent = append(c.silent, made)
	c.mu.Unlock()
	if evicted != nil {
		evicted.Close()
	}
	return made, nil
}

// Close ends the listener, and an Accept that waits.
func (c *crowd) Close() error {
	c.mu.Lock()
	c.closed = true
	c.room.Broadcast()
	c.mu.Unlock()
	return c.Listener.Close()
}

// follow moves a connection to talking when its request begins; http.Server calls it. Accept
// does not close it from then on.
func (c *crowd) follow(conn net.Conn, state http.ConnState) {
	made, ok := conn.(*crowdedConn)
	if !ok || state != http.StateActive {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.silent, made); i >= 0 {
		c.silent = slices.Delete(c.silent, i, i+1)
		c.talking[made] = true
	}
}

// Close closes the connection and makes room for another one.
func (m *crowdedConn) Close() error {
	c := m.crowd
	c.mu.Lock()
	c.silent = slices.DeleteFunc(c.silent, func(o *crowdedConn) bool { return o == m })
	delete(c.talking, m)
	c.room.Signal()
	c.mu.Unlock()
	return m.Conn.Close()
}
