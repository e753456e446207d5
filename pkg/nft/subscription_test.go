package nft

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

func TestSubscriptionOverflow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		s, err := Subscribe(func(uint32, uint32) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.conn.SetReadBuffer(1); err != nil { // the kernel's minimum: a few messages
			t.Fatal(err)
		}
		var script strings.Builder
		for i := range 60 {
			fmt.Fprintf(&script, "nft add table ip t%d\n", i)
		}
		nstest.Command(t, "sh", "-ec", script.String())
		for n := 0; err == nil; n++ {
			var c Commit
			if c, err = s.Receive(); err == nil && c.Genid != uint32(n)+2 {
				t.Fatalf("commit %d has genid %d: there is a gap", n, c.Genid)
			}
		}
		// The first error is the last, although the kernel sends commits again.
		nstest.Command(t, "nft", "add", "table", "ip", "last")
		for range 3 {
			if !errors.Is(err, ErrOverflow) {
				t.Fatal(err)
			}
			_, err = s.Receive()
		}
		fresh, err := Subscribe(func(uint32, uint32) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		defer fresh.Close()
		nstest.Command(t, "nft", "delete", "table", "ip", "last")
		if c, err := fresh.Receive(); err != nil || c.Genid != 63 {
			t.Errorf("a fresh subscription receives %+v, %v", c, err)
		}
		s.Close()
		if _, err := s.Receive(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after Close, Receive returns %v", err)
		}
	})
}

// TestSubscriptionMiss: Miss wakes a waiting Receive, and earlier commits are not
// lost.
func TestSubscriptionMiss(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		s, err := Subscribe(func(uint32, uint32) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		nstest.Command(t, "nft", "add", "table", "ip", "a")
		if _, err := s.Receive(); err != nil {
			t.Fatal(err)
		}
		received := make(chan error, 1)
		go func() { _, err := s.Receive(); received <- err }()
		testkit.Pass(t, 10*time.Millisecond, "that Miss wakes a Receive that waits already")
		s.Miss()
		if err := <-received; !errors.Is(err, ErrOverflow) {
			t.Errorf("after Miss, Receive returns %v", err)
		}
		s.Leave()
		s.Join()
		if _, err := s.Receive(); !errors.Is(err, ErrOverflow) {
			t.Errorf("after Join, Receive returns %v", err)
		}
	})
}
