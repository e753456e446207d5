package native_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// amendSteps is the number of random changes of a table that a test follows.
const amendSteps = 120

// A twin is a table that is made equal to another table, again and again.
type twin struct {
	*testing.T
	conn  *nft.Conn
	id    tableid.TableID // of the original
	was   *native.Table   // the twin's content
	names int
}

// named returns a table's value with the twin's name.
func (w *twin) named(t *native.Table) *native.Table {
	same := *t
	same.ID.Name = "twin"
	return &same
}

func (w *twin) original() *native.Table {
	w.Helper()
	r, err := native.Capture(w.conn, func(t nft.Table) bool { return t.Family.Table(t.Name) == w.id })
	if err != nil {
		w.Fatal(err)
	}
	return w.named(r.Tables[w.id])
}

// make makes the twin in pieces.
func (w *twin) make(piece int) {
	w.Helper()
	nstest.Command(w.T, "nft", "add", "table", w.id.Family.NFT(), "twin")
	w.was = w.original()
	pieces := 0
	err := w.was.FillInPieces(piece, func(b *nft.Batch) error {
		b.Finish()
		pieces++
		return b.Send()
	})
	if err != nil {
		w.Fatal(err)
	}
	if piece < 10_000 && pieces < 3 {
		w.Errorf("it was written in %d pieces", pieces)
	}
	w.check("made in pieces")
}

// follow makes the twin equal to the original, by the difference.
func (w *twin) follow(why string) error {
	w.Helper()
	next, b := w.original(), nft.NewBatch()
	err := next.Amend(b, w.was, func() string { w.names++; return fmt.Sprintf("__twin%d", w.names) })
	if err != nil {
		return err
	}
	if b.Finish(); b.Messages() > 2 {
		if err := b.Send(); err != nil {
			w.Fatalf("%s: %v", why, err)
		}
	}
	w.was = next
	w.check(why)
	return nil
}

func (w *twin) check(why string) {
	w.Helper()
	r, err := native.Capture(w.conn, func(t nft.Table) bool { return t.Name == "twin" })
	if err != nil {
		w.Fatal(err)
	}
	for _, now := range r.Tables {
		for _, c := range native.Diff(w.was, now) {
			if c.Kind != nft.Tables { // another comment
				w.Fatalf("%s: the twin differs: %v", why, c)
			}
		}
	}
}

// An amender draws changes of a table.
type amender struct {
	*generator
	named int
}

// rule draws a rule of a chain. It leads to later chains only.
func (a *amender) rule(chain int) string {
	to := func() string {
		if chain+1 > 4 {
			return "accept"
		}
		return fmt.Sprintf("%s c%d", a.pick([]string{"jump", "goto"}), chain+1+a.IntN(5-chain))
	}
	return a.pick([]string{
		"ip saddr " + a.address() + " " + to(), "tcp dport { " + a.several(5, a.port) + " } " + to(),
		"ip daddr @plain counter drop", "ip daddr @ranges " + to(), "tcp dport vmap { " + a.port() + " : " + to() + " }",
		"ip saddr . tcp dport @pairs return", "ip saddr != { 10.0.0.0/8, 192.168.1.0/24 } drop", "meta mark set " + a.port(),
	})
}

// script draws some changes.
func (a *amender) script() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	for range 1 + a.IntN(4) {
		chain := a.IntN(6)
		a.named++
		switch a.IntN(9) {
		case 0:
			line("flush chain ip real c%d", chain)
		case 1, 2:
			line("add rule ip real c%d %s", chain, a.rule(chain))
		case 3:
			line("insert rule ip real c%d %s", chain, a.rule(chain))
		case 4:
			line("add element ip real plain { %s }", a.several(4, a.address))
			line("add element ip real pairs { %s . %s }", a.address(), a.port())
		case 5:
			line("flush set ip real %s", a.pick([]string{"plain", "ranges", "pairs"}))
			line("add element ip real ranges { 10.%d.0.0/16, 172.16.%d.1-172.16.%d.99 }", a.IntN(200), a.named%250, a.named%250)
		case 6:
			line("flush map ip real verdicts")
			line("add element ip real verdicts { 80 : goto c%d, %s : accept }", 1+a.IntN(5), "1"+a.port()[:1])
		case 7:
			line("add chain ip real new%d", a.named)
			line("add rule ip real new%d %s", a.named, a.rule(4))
			line("add set ip real more%d { type ipv4_addr; elements = { %s }; }", a.named, a.address())
			line("add rule ip real c%d ip saddr @more%d goto new%d", chain, a.named, a.named)
			line("add element ip real verdicts { %d : jump new%d }", 1000+a.named, a.named)
		case 8: // delete the parts to which nothing leads any more
			line("flush map ip real verdicts")
			for i := range 6 {
				line("flush chain ip real c%d", i)
			}
			for i := range a.named {
				line("destroy chain ip real new%d", i)
				line("destroy set ip real more%d", i)
			}
		}
	}
	return b.String()
}

// TestATableIsFollowedByDifference: an owner changes its table at random. A copy must become equal
// by Amend's messages, and the kernel must accept these.
func TestATableIsFollowedByDifference(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		owner := nstest.StartNFT(t)
		for seed := range testkit.Size(uint64(1), 3) {
			owner.Run("flush ruleset\n" + `table ip real {
	set plain { type ipv4_addr; }
	set ranges { type ipv4_addr; flags interval; }
	set pairs { type ipv4_addr . inet_service; }
	chain c5 { }
	chain c4 { }
	chain c3 { }
	chain c2 { }
	chain c1 { }
	map verdicts { type inet_service : verdict; }
	chain c0 { type nat hook prerouting priority -100; tcp dport vmap @verdicts; }
	chain in { type filter hook input priority 0; tcp dport { 1, 2 } jump c1; }
}
`)
			w := &twin{T: t, conn: dial(t), id: tableid.IPv4.Table("real")}
			w.make(1 << 20)
			a, taken := &amender{generator: &generator{Rand: rand.New(rand.NewPCG(seed, 5))}}, 0
			for range amendSteps {
				script := a.script()
				if owner.Try(script) != nil {
					continue // a chain leads in a circle, or there is no such element
				}
				taken++
				if err := w.follow(script); err != nil {
					t.Fatalf("seed %d: %v\n%s", seed, err, script)
				}
			}
			if taken < amendSteps/3 {
				t.Errorf("nft took %d of %d changes", taken, amendSteps)
			}
		}
	})
}

// TestWhatAmendDoesNotWrite: Amend must refuse a difference of another kind, so that its caller
// writes the whole table.
func TestWhatAmendDoesNotWrite(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		for name, change := range map[string]string{
			"a base chain":                   "add chain ip real more { type filter hook input priority 7; }",
			"an object":                      "add counter ip real hits",
			"a set of the same name":         "delete set ip real some\nadd set ip real some { type inet_service; }",
			"a chain of the same name":       "delete chain ip real base\nadd chain ip real base { type filter hook input priority 9; }",
			"a chain that belongs to a rule": "add rule ip real c tcp dport 7 jump { tcp dport 8 accept; }",
		} {
			nstest.Command(t, "nft", "flush", "ruleset")
			nstest.CommandInput(t, "table ip real {\n\tset some { type ipv4_addr; }\n\tchain c { }\n\tchain base { type filter hook input priority 8; }\n}\n", "nft", "-f", "-")
			w := &twin{T: t, conn: dial(t), id: tableid.IPv4.Table("real")}
			w.make(1 << 20)
			nstest.CommandInput(t, change+"\n", "nft", "-f", "-")
			if err := w.follow(name); !errors.Is(err, native.ErrWhole) {
				t.Errorf("%s: got %v, want %v", name, err, native.ErrWhole)
			}
		}
	})
}

// TestKubeProxysTableInPieces: kube-proxy's table of 100 services is written in pieces, and must be
// the same.
func TestKubeProxysTableInPieces(t *testing.T) {
	text := services(t, services100)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, text, "nft", "-f", "-")
		w := &twin{T: t, conn: dial(t), id: tableid.IPv4.Table("kube-proxy")}
		w.make(4 << 10)
	})
}
