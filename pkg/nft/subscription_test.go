package nft

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

func TestSubscriptionOverflow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s, err := Subscribe(func(uint32, uint32) bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if err := s.conn.SetReadBuffer(1); err != nil { // the kernel's least: a few messages
			t.Fatal(err)
		}
		var script strings.Builder
		for i := range 60 {
			fmt.Fprintf(&script, "nft add table ip t%d\n", i)
		}
		nstest.Command(t, "sh", "-ec", script.String())
		for err = nil; !errors.Is(err, ErrOverflow); {
			if _, err = s.Receive(); err != nil && !errors.Is(err, ErrOverflow) {
				t.Fatal(err)
			}
		}
		// Nothing is dropped any more, although what was in the buffer was
		// not fetched yet.
		nstest.Command(t, "nft", "add", "table", "ip", "last")
		for {
			c, err := s.Receive()
			if err != nil {
				t.Fatalf("after the overflow: %v", err)
			}
			if genid, err := conn.Genid(); err != nil {
				t.Fatal(err)
			} else if c.Genid == genid {
				break
			}
		}
	})
}
