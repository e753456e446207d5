package standby_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// tables is how many random tables each family sends packets through.
const tables = 25

// classes makes one number of ports among which the kernel chooses as it likes.
func classes(all map[flow]fate) map[flow]fate {
	out := map[flow]fate{}
	for f, is := range all {
		out[f] = fate{class(f.From, is.From), class(f.To, is.To), is.Mark}
	}
	return out
}

func class(asked, is netip.AddrPort) netip.AddrPort {
	const inRange, anyPort = 1, 2
	switch p := is.Port(); {
	case p == asked.Port(), p < 1024:
	case p >= 8080 && p <= 8090:
		return netip.AddrPortFrom(is.Addr(), inRange)
	default:
		return netip.AddrPortFrom(is.Addr(), anyPort)
	}
	return is
}

// untouched reports whether neither of a flow's ends is another.
func untouched(f flow, is fate) bool { return is.From == f.From && is.To == f.To }

// TestTheCopyTranslatesAsTheRules sends packets through random rules, and through their copy while
// of the rules nothing stands: the same addresses, ports and marks come of it.
func TestTheCopyTranslatesAsTheRules(t *testing.T) {
	for _, family := range []tableid.Family{tableid.IPv4, tableid.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				l := newLab(t, family)
				conn := dial(t)
				translated := 0
				for n := range uint64(tables) {
					d := &deck{Rand: rand.New(rand.NewPCG(18, n)), family: family}
					text, flows := d.nat(), d.flows(60)
					restore(t, family, text)
					want := l.fates(flows)
					s := open(t, standby.Config{GateMost: []int{0, -1}[n%2]})
					c := translate(t, source(t, conn, family.Table("nat")), nil)
					if left := c.LeftOut(); len(left) > 0 {
						t.Fatalf("table %d: left out: %v", n, left)
					}
					must(t, s.Put(c))
					nstest.Command(t, "nft", "delete", "table", family.NFT(), "nat")
					shut := l.fates(flows)
					must(t, s.Open(family.Table("nat"), c.Hooks(), nil))
					got := l.fates(flows)
					for f, is := range shut {
						if !untouched(f, is) {
							t.Fatalf("table %d: the shut copy makes %v of %v", n, is, f)
						}
					}
					for f, is := range want {
						if !untouched(f, is) {
							translated++
						}
					}
					if diff := cmp.Diff(classes(want), classes(got), comparer); diff != "" {
						t.Fatalf("table %d: (-through the rules +through the copy)\n%s\n%s", n, diff, text)
					}
					must(t, s.Close())
				}
				t.Logf("%d flows were translated", translated)
				if translated < tables*10 {
					t.Errorf("only %d flows were translated: the test shows little", translated)
				}
			})
		})
	}
}

var comparer = cmpopts.EquateComparable(netip.AddrPort{})
