package standby_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestWhatIsLeftOutIsUntouched: some chains cannot be copied. Each flow must have the fate that the
// rules give it, or keep its destination.
func TestWhatIsLeftOutIsUntouched(t *testing.T) {
	for _, family := range []tableid.Family{tableid.IPv4, tableid.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				l := newLab(t, family)
				conn := dial(t)
				id := family.Table("nat")
				kept, same := 0, 0
				for n := range uint64(tables) {
					d := &deck{Rand: rand.New(rand.NewPCG(5, n)), family: family, odd: true}
					text, flows := d.nat(), d.flows(40)
					restore(t, family, text)
					c, err := standby.Translate(source(t, conn, id), nil)
					if errors.Is(err, standby.ErrUnavailable) {
						continue
					}
					must(t, err)
					if len(c.LeftOut()) == 0 {
						continue
					}
					want := l.drawn(flows)
					s := open(t, standby.Config{})
					must(t, s.Put(c))
					drop(t, family.Table("nat"))
					must(t, s.Open(id, c.Hooks(), nil))
					for f, is := range l.drawn(flows) {
						switch {
						case is == want[f]:
							same++
						case is.To == f.To:
							kept++
						default:
							t.Fatalf("table %d: %v fares %v and should fare %v, or be left alone; left out: %v\n%s", n, f, is, want[f], c.LeftOut(), text)
						}
					}
					must(t, s.Close())
					goneOf(t, conn, id)
				}
				t.Logf("%d flows fared as through the rules, %d were left alone", same, kept)
				if same == 0 || kept == 0 {
					t.Error("the test shows little")
				}
			})
		})
	}
}
