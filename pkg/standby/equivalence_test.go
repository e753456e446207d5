package standby_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// tables is the number of random tables through which each family sends packets.
var tables = testkit.Size(8, 25)

// classes makes one number of all ports among which the kernel chooses freely.
func classes(all map[flow]fate) map[flow]fate {
	out := map[flow]fate{}
	for f, is := range all {
		out[f] = fate{class(f.From, is.From), class(f.To, is.To), is.Mark}
	}
	return out
}

// These ports represent others: any port of the range that rules name, and any port at all. For
// rules without a range the kernel chooses from 1024 on (nf_nat_l4proto_unique_tuple), so that no
// port is in the range by chance.
const (
	inRange    = 1
	anyPort    = 2
	rangeFirst = 800
	rangeLast  = 810
)

func class(asked, is netip.AddrPort) netip.AddrPort {
	switch p := is.Port(); {
	case p == asked.Port():
	case p >= rangeFirst && p <= rangeLast:
		return netip.AddrPortFrom(is.Addr(), inRange)
	case p >= 1024:
		return netip.AddrPortFrom(is.Addr(), anyPort)
	}
	return is
}

// drawn sends flows twice and returns the classes of their fates. A port that is chosen among many
// may by chance be the original port, but not twice.
func (l *lab) drawn(flows []flow) map[flow]fate {
	l.Helper()
	all := classes(l.fates(flows))
	for f, again := range classes(l.fates(flows)) {
		is := all[f]
		all[f] = fate{wilder(f.From, is.From, again.From), wilder(f.To, is.To, again.To), again.Mark}
	}
	return all
}

// wilder returns the wider of two classes of one end, for which the kernel had more ports to choose
// from.
func wilder(asked, a, b netip.AddrPort) netip.AddrPort {
	if a.Port() == anyPort || b.Port() == asked.Port() {
		return netip.AddrPortFrom(b.Addr(), a.Port())
	}
	return b
}

// untouched reports whether both ends of a flow are unchanged.
func untouched(f flow, is fate) bool { return is.From == f.From && is.To == f.To }

// TestTheCopyTranslatesAsTheRules sends packets through random rules, and through their copy after
// the rules are deleted. Both must give the same addresses, ports and marks.
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
					want := l.drawn(flows)
					s := open(t, standby.Config{GateMost: []int{0, -1}[n%2]})
					c := translate(t, source(t, conn, family.Table("nat")), nil)
					if left := c.LeftOut(); len(left) > 0 {
						t.Fatalf("table %d: left out: %v", n, left)
					}
					must(t, s.Put(c))
					drop(t, family.Table("nat"))
					shut := l.fates(flows)
					must(t, s.Open(family.Table("nat"), c.Hooks(), nil))
					got := l.drawn(flows)
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
					if diff := cmp.Diff(want, got, comparer); diff != "" {
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
