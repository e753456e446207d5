package native

import (
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

type compareSite struct{}

func (compareSite) Local(a netip.Addr) bool { return a == four }

var four = netip.MustParseAddr("192.0.2.1")

func (compareSite) Beyond(string, netip.Addr) bool { return true }

func gunzip(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func loadAll(t *testing.T, text string) []*Table {
	t.Helper()
	nstest.CommandInput(t, "flush ruleset\n"+text, "nft", "-f", "-")
	conn, err := nft.Dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r, err := Capture(conn, func(nft.Table) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	return r.InOrder()
}

type asked struct {
	flow    nat.Flow
	backend netip.AddrPort
}

func someFlows(r *rand.Rand, to, by []string, count int) (all []asked) {
	sources := []string{"192.0.2.1", "198.51.100.7", "10.1.7.9", "10.244.1.9", "10.88.0.2"}
	for len(all) < count {
		backend := netip.MustParseAddrPort(by[r.IntN(len(by))])
		from := netip.MustParseAddr(sources[r.IntN(len(sources))])
		if r.IntN(4) == 0 {
			from = backend.Addr()
		}
		all = append(all, asked{nat.Flow{Protocol: []uint8{nat.TCP, nat.TCP, nat.UDP}[r.IntN(3)], Source: netip.AddrPortFrom(from, 4000), Destination: netip.MustParseAddrPort(to[r.IntN(len(to))])}, backend})
	}
	return all
}

type counts struct {
	positive, gained, lost [2]int
	port                   int
}

func (c *counts) compare(t *testing.T, tables []*Table, all []asked, gain, lose [2]bool, text string) {
	t.Helper()
	was := OldTranslationsOf(tables, tableid.IPv4, compareSite{}.Local)
	is := nat.New(compareSite{}, NatHooks(tables, tableid.IPv4))
	for _, a := range all {
		for kind := range 2 {
			old, now := was.Translates(OldFlow(a.flow)), is.Translates(a.flow)
			if kind == 1 {
				old, now = was.Masquerades(OldFlow(a.flow), a.backend), is.Masquerades(a.flow, a.backend)
			}
			if now {
				c.positive[kind]++
			}
			if kind == 1 && !now && old && text == "" { // another port of the same address
				for _, other := range all {
					now = now || other.backend.Addr() == a.backend.Addr() && is.Masquerades(a.flow, other.backend)
				}
				c.port++
			}
			if now && !old {
				c.gained[kind]++
			}
			if old && !now {
				c.lost[kind]++
			}
			if now && !old && !gain[kind] || old && !now && !lose[kind] {
				t.Fatalf("%v by %v: kind %d is %t, was %t\n%s", a.flow, a.backend, kind, now, old, text)
			}
		}
	}
}

func TestCompareNativeCorpora(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(5, 5))
		for _, n := range []string{"100", "1000"} {
			text := gunzip(t, "../../hack/bench/heal/testdata/services-"+n+".nft.gz")
			to, by := places(text)
			var c counts
			c.compare(t, loadAll(t, text), someFlows(r, to, by, 20000), [2]bool{}, [2]bool{}, "")
			t.Logf("%s services: %+v", n, c)
		}
		files, _ := filepath.Glob("testdata/corpus/*.nft")
		var c counts
		for _, f := range files {
			b, _ := os.ReadFile(f)
			if slices.ContainsFunc([]string{"flowtable", "statement-queue", "object-secmark"}, func(s string) bool { return strings.Contains(f, s) }) {
				continue
			}
			tables := loadAll(t, string(b))
			c.compare(t, tables, someFlows(r, []string{"10.0.0.1:80", "192.0.2.1:8080", "10.96.0.10:53", "10.1.1.1:80", "10.0.0.1:443"}, []string{"10.0.0.2:80", "192.168.1.1:80", "10.0.0.1:8080"}, 500), [2]bool{strings.Contains(f, "map-data") || strings.Contains(f, "dnat")}, [2]bool{strings.Contains(f, "dnat-prefix")}, f)
		}
		t.Logf("corpus: %+v", c)
	})
}

func places(text string) (to, by []string) {
	to = []string{"203.0.113.9:80", "192.0.2.1:80", "192.0.2.1:30080"}
	for _, m := range regexp.MustCompile(`([0-9.]+) \. (?:tcp|udp) \. (\d+)(?: comment "[^"]*")? : goto`).FindAllStringSubmatch(text, -1) {
		to = append(to, m[1]+":"+m[2])
	}
	for _, m := range regexp.MustCompile(`: ([0-9.]+) \. (\d+)`).FindAllStringSubmatch(text, -1) {
		by = append(by, m[1]+":"+m[2])
	}
	return to, by
}

// someTable makes a table by chance. A plain one has no rule about which the answers differ.
func someTable(r *rand.Rand, name string, plain bool) string {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	destinations := []string{"10.88.0.9:80", "10.88.0.9:80", "10.88.0.8:80", "numgen random mod 2 map { 0 : 10.88.0.9 . 80, 1 : 10.88.0.8 . 80 }", "ip saddr . tcp dport map { 10.88.0.2 . 8080 : 10.88.0.9 . 80 }"}
	if !plain {
		destinations = append(destinations, "10.88.0.9:81", "10.96.0.10:80", "10.96.0.10:81", "10.88.0.2-10.88.0.9", "10.96.0.10-10.96.0.20", "10.88.0.9:80-90", "10.88.0.9",
			"numgen random mod 3 map { 0 : 10.88.0.9 . 80, 1 : 10.88.0.8 . 80 }", "tcp dport map { 80 : 10.88.0.9, 8080 : 10.96.0.10 }", "numgen random mod 2 map { 0 : 10.88.0.9, 1 : 10.88.0.8 }")
	}
	line := func(last, i int, post bool) string {
		var m []string
		add := func(in int, s string) {
			if r.IntN(in) == 0 {
				m = append(m, s)
			}
		}
		add(4, pick("ip daddr 10.96.0.10", "ip daddr 10.96.0.0/24", "ip daddr != 10.96.0.10", "ip daddr { 192.0.2.1, 10.96.0.10 }", "ip daddr @nets", "ip daddr 10.88.0.9"))
		add(5, pick("ip saddr 10.88.0.0/16", "ip saddr != 10.244.0.0/16", "ip saddr 198.51.100.7"))
		add(5, pick("tcp dport 80", "tcp dport { 80, 8080 }", "tcp dport 1-100", "meta l4proto tcp"))
		add(6, pick(`iifname "eth0"`, "fib daddr type local", "ct state new", "limit rate 1/second"))
		add(6, pick("meta mark & 1 == 1", "meta mark & 2 == 2", "meta mark & 1 == 0", "meta mark 3"))
		add(6, pick("meta mark set meta mark | 1", "meta mark set meta mark | 2", "meta mark set meta mark & 0xfffffffe", "meta mark set 1", "meta mark set ct mark"))
		target := ""
		to := fmt.Sprintf("c%d", i+1+r.IntN(max(1, last-i)))
		switch n := r.IntN(12); {
		case n < 3 && i < last:
			target = pick("jump ", "goto ") + to
		case n < 4 && i < last:
			target = pick("numgen random mod 2 vmap { 0 : goto "+to+", 1 : jump "+to+" }", "numgen random mod 3 vmap { 0 : goto "+to+", 1 : goto "+to+" }", "tcp dport vmap { 80 : jump "+to+", 8080 : return }",
				"ip daddr . tcp dport vmap { 10.96.0.10 . 80 : goto "+to+" }", "iifname vmap { eth0 : jump "+to+", eth1 : return }", "meta mark vmap { 1 : jump "+to+" }")
		case n < 5:
			target = ""
		case n < 6:
			target = pick("return", "return", "accept", "continue")
		case post:
			target = "masquerade"
			if !plain {
				target = pick("masquerade", "snat to 192.0.2.1", "snat to 10.88.0.2", "snat to 192.0.2.1-192.0.2.5")
			}
		default:
			target = "meta l4proto tcp dnat to " + destinations[r.IntN(len(destinations))]
			if !plain && r.IntN(8) == 0 {
				target = "meta l4proto tcp redirect to :80"
			}
		}
		if len(m) == 0 && target == "" {
			return "counter"
		}
		return strings.Join(append(m, target), " ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "table ip %s {\nset nets { type ipv4_addr; flags interval; elements = { 10.96.0.0/16, 192.0.2.0/24 }; }\n", name)
	for _, part := range []struct {
		first, last int
		post        bool
	}{{0, 3, false}, {4, 7, true}} {
		for i := part.last; i >= part.first; i-- {
			fmt.Fprintf(&b, "chain c%d {\n", i)
			for range r.IntN(4) {
				fmt.Fprintf(&b, "%s\n", line(part.last, i, part.post))
			}
			b.WriteString("}\n")
		}
	}
	fmt.Fprintf(&b, "chain pre { type nat hook prerouting priority dstnat; jump c%d; goto c%d; }\n", r.IntN(2), r.IntN(3))
	fmt.Fprintf(&b, "chain out { type nat hook output priority -100; goto c%d; }\n", r.IntN(3))
	fmt.Fprintf(&b, "chain post { type nat hook postrouting priority srcnat; jump c%d; goto c%d; }\n}\n", 4+r.IntN(2), 4+r.IntN(4))
	return b.String()
}

func TestCompareNativeGenerated(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		to := []string{"10.96.0.10:80", "10.96.0.10:80", "10.96.0.10:8080", "192.0.2.1:8080", "192.0.2.1:80", "203.0.113.7:53"}
		by := []string{"10.88.0.9:80", "10.88.0.9:80", "10.88.0.8:80"}
		for _, plain := range []bool{true, false} {
			var c counts
			for batch := range uint64(8) {
				texts := map[string]string{}
				all := ""
				for i := range 250 {
					name := fmt.Sprintf("t%d", i)
					texts[name] = someTable(rand.New(rand.NewPCG(batch, uint64(i))), name, plain)
					all += texts[name]
				}
				for _, table := range loadAll(t, all) {
					c.compare(t, []*Table{table}, someFlows(rand.New(rand.NewPCG(batch, 9)), to, by, 40), [2]bool{!plain, true}, [2]bool{!plain, !plain}, texts[table.ID.Name])
				}
			}
			t.Logf("plain %t: %+v", plain, c)
		}
	})
}

func benches(b *testing.B, old bool) {
	tables := benched
	to, by := places(gunzip(b, "../../hack/bench/heal/testdata/services-5000.nft.gz"))
	all := someFlows(rand.New(rand.NewPCG(3, 3)), to, by, 10000)
	var tr *nat.Translations
	was := OldTranslationsOf(tables, tableid.IPv4, compareSite{}.Local)
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		tr = nat.New(compareSite{}, NatHooks(tables, tableid.IPv4))
		for _, a := range all {
			if old {
				was.Translates(OldFlow(a.flow))
			} else {
				tr.Translates(a.flow)
			}
		}
	}
}

var benched []*Table

func TestCompareNativeSpeed(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		text := gunzip(t, "../../hack/bench/heal/testdata/services-5000.nft.gz")
		tables := loadAll(t, text)
		to, by := places(text)
		all := someFlows(rand.New(rand.NewPCG(3, 3)), to, by, 10000)
		if os.Getenv("PROF") != "" {
			benched = tables
			f, _ := os.Create(os.Getenv("PROF"))
			pprof.StartCPUProfile(f)
			for range 3 {
				fmt.Println("old", testing.Benchmark(func(b *testing.B) { benches(b, true) }), testing.Benchmark(func(b *testing.B) { benches(b, true) }).MemString())
				fmt.Println("new", testing.Benchmark(func(b *testing.B) { benches(b, false) }), testing.Benchmark(func(b *testing.B) { benches(b, false) }).MemString())
			}
			pprof.StopCPUProfile()
			f.Close()
		}
		few := all[:300]
		best := map[string]time.Duration{}
		for range 40 {
			for name, of := range map[string][]asked{"make": nil, "few": few, "all": all} {
				for kind, f := range map[string]func(){
					"old " + name: func() {
						tr := OldTranslationsOf(tables, tableid.IPv4, compareSite{}.Local)
						for _, a := range of {
							tr.Translates(OldFlow(a.flow))
						}
					},
					"new " + name: func() {
						tr := nat.New(compareSite{}, NatHooks(tables, tableid.IPv4))
						for _, a := range of {
							tr.Translates(a.flow)
						}
					},
					"old masquerades " + name: func() {
						tr := OldTranslationsOf(tables, tableid.IPv4, compareSite{}.Local)
						for _, a := range of {
							tr.Masquerades(OldFlow(a.flow), a.backend)
						}
					},
					"new masquerades " + name: func() {
						tr := nat.New(compareSite{}, NatHooks(tables, tableid.IPv4))
						for _, a := range of {
							tr.Masquerades(a.flow, a.backend)
						}
					},
				} {
					start := time.Now()
					f()
					if took := time.Since(start); best[kind] == 0 || took < best[kind] {
						best[kind] = took
					}
				}
			}
		}
		for _, what := range []string{"make", "few", "all", "masquerades few", "masquerades all"} {
			t.Logf("%s: old %v, new %v, ratio %.2f", what, best["old "+what], best["new "+what], float64(best["new "+what])/float64(best["old "+what]))
		}
	})
}
