package standby_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
)

// TestABuildInSteps: a copy must not be opened before its last step. A build that is given up must
// leave no table. In the end the kernel must have the newer copy.
func TestABuildInSteps(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		restore(t, nat.Family, bigNat(1, -1))
		conn := dial(t)
		s := open(t, standby.Config{Piece: 4096})
		first := translate(t, source(t, conn, nat), nil)
		steps := func(c *standby.Copy, most int) (n int) {
			t.Helper()
			for ; n < most; n++ {
				more, err := s.PutPiece(c)
				must(t, err)
				if !more {
					return n
				}
				// An overtaken copy counts as built once it is complete, before the difference is
				// written.
				if c == first && (s.Status(nat).Built || !errors.Is(s.Open(nat, c.Hooks(), nil), standby.ErrNotBuilt)) {
					t.Fatal("a copy that is being built may be opened")
				}
			}
			return n
		}
		if n := steps(first, 3); n != 3 {
			t.Fatalf("it was built in %d steps", n)
		}
		must(t, s.Remove(nat))
		gone(t, conn)

		steps(first, 3)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-A", "KUBE-SERVICES", "-d", "203.0.113.77", "-p", "tcp", "-j", "DNAT", "--to-destination", "203.0.113.78:80")
		steps(translate(t, source(t, conn, nat), nil), math.MaxInt)
		if !s.Status(nat).Built || !strings.Contains(listed(t, nat), "203.0.113.77") {
			t.Error("the copy lacks what came while it was built")
		}

		must(t, s.Remove(nat))
		steps(first, 3)
		must(t, s.Close())
		gone(t, conn)
	})
}

// TestACopyThatDoesNotFit: while the control group has no room for a copy, Put must begin nothing.
// With room it must build the copy.
func TestACopyThatDoesNotFit(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		restore(t, nat.Family, bigNat(1, -1))
		conn := dial(t)
		room := int64(1 << 20)
		s := open(t, standby.Config{Room: func() int64 { return room }})
		c := translate(t, source(t, conn, nat), nil)
		if err := s.Put(c); !errors.Is(err, standby.ErrMemory) {
			t.Errorf("got %v, want %v", err, standby.ErrMemory)
		}
		gone(t, conn)
		room = math.MaxInt64
		must(t, s.Put(c))
	})
}
