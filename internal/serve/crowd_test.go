package serve

import (
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
)

// TestACrowdThatTalks: while every connection has a request, the next one waits until one ends.
func TestACrowdThatTalks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := newCrowd(l, 2)
	accepted := make(chan net.Conn)
	var accepting sync.WaitGroup
	accepting.Go(func() {
		defer close(accepted)
		for {
			conn, err := c.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	})
	var first net.Conn
	for i := range 4 {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		switch i {
		case 0:
			first = <-accepted
			c.follow(first, http.StateActive)
		case 1:
			c.follow(<-accepted, http.StateActive)
		}
	}
	testkit.Pass(t, 50*time.Millisecond, "that a third connection waits")
	select {
	case <-accepted:
		t.Error("a third connection did not wait")
	default:
	}
	first.Close()
	third := <-accepted
	c.follow(third, http.StateActive)
	c.Close()
	for range accepted { // the fourth may have been accepted before the end
	}
	accepting.Wait()
}
