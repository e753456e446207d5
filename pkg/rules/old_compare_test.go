package rules

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/nat"
)

type compareSite struct{}

func (compareSite) Local(a netip.Addr) bool {
	return a.IsLoopback() || a == four || a == six
}

var four, six = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")

func (compareSite) Beyond(iface string, a netip.Addr) bool {
	return iface != "docker0" || netip.MustParsePrefix("10.244.0.0/16").Contains(a)
}

func gunzip(t testing.TB, path string) []byte {
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
	return b
}

func corpora(t testing.TB) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, path := range []string{"kube/testdata/kube-proxy-1.36.3.tar.gz", "kube/testdata/random-1.36.3.tar.gz"} {
		r := tar.NewReader(strings.NewReader(string(gunzip(t, path))))
		for {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(h.Name, "expected.rules") {
				b, _ := io.ReadAll(r)
				all[path+h.Name] = string(b)
			}
		}
	}
	for _, n := range []string{"100", "1000"} {
		all["services-"+n] = string(gunzip(t, "../../hack/bench/heal/testdata/services-"+n+".rules.gz"))
	}
	for _, f := range []string{"node.nft.save", "node.legacy.save", "quotes.nft.save"} {
		b, err := os.ReadFile("testdata/" + f)
		if err != nil {
			t.Fatal(err)
		}
		all[f] = string(b)
	}
	return all
}

var addressIn = regexp.MustCompile(`-d (\S+?)(?:/32|/128)? `)
var backendIn = regexp.MustCompile(`--to-destination (\S+)`)
var portIn = regexp.MustCompile(`--dports? (\d+)`)

func generationOf(t testing.TB, f Family, text string) Generation {
	t.Helper()
	text = regexp.MustCompile(`(?m)^(-A \S+ )(.*) -d (\d+\.\d+\.\d+\.\d+) `).ReplaceAllString(text, "${1}-d $3/32 $2 ")
	set, _, err := Parse(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	nat := Protection{Chain: func(c string) bool {
		return !slices.Contains([]string{"PREROUTING", "OUTPUT", "INPUT", "POSTROUTING", "FOREIGN"}, c)
	}}.Extract(set[Nat], func(Rule) bool { return false })
	return Generation{f.Table(Nat): nat}
}

type asked struct {
	flow    nat.Flow
	backend netip.AddrPort
}

func flowsFor(r *rand.Rand, text string, count int) (all []asked) {
	six := strings.Contains(text, "::") && !strings.Contains(text, "-d 10.")
	addrs := []string{"192.0.2.1", "127.0.0.1", "203.0.113.9", "10.96.0.10"}
	sources := []string{"192.0.2.1", "127.0.0.1", "198.51.100.7", "10.1.7.9", "10.244.1.9", "10.0.0.5"}
	if six {
		addrs, sources = []string{"2001:db8::1", "::1", "2001:db9::7"}, []string{"2001:db8::1", "::1", "2001:dba::7", "fd00:244::9"}
	}
	for _, m := range addressIn.FindAllStringSubmatch(text, -1) {
		addrs = append(addrs, m[1])
	}
	ports := []string{"80", "53", "30080"}
	for _, m := range portIn.FindAllStringSubmatch(text, -1) {
		ports = append(ports, m[1])
	}
	backends := []string{"10.244.1.2:8080"}
	if six {
		backends = []string{"[fd00::1]:80"}
	}
	for _, m := range backendIn.FindAllStringSubmatch(text, -1) {
		backends = append(backends, m[1])
	}
	for len(all) < count {
		to, err := netip.ParseAddrPort(addrs[r.IntN(len(addrs))] + ":" + ports[r.IntN(len(ports))])
		if err != nil {
			to, err = netip.ParseAddrPort("[" + addrs[r.IntN(len(addrs))] + "]:" + ports[r.IntN(len(ports))])
			if err != nil {
				to = netip.MustParseAddrPort("10.96.0.10:80")
			}
		}
		by, err := netip.ParseAddrPort(backends[r.IntN(len(backends))])
		if err != nil {
			by = netip.MustParseAddrPort("10.244.1.2:8080")
		}
		from, err := netip.ParseAddr(sources[r.IntN(len(sources))])
		if err != nil || r.IntN(3) == 0 {
			from = by.Addr()
		}
		all = append(all, asked{nat.Flow{Protocol: []uint8{nat.TCP, nat.UDP, nat.SCTP}[r.IntN(3)], Source: netip.AddrPortFrom(from, uint16(4000+r.IntN(2))), Destination: to}, by})
	}
	return all
}

// answers compares both, and returns how many were positive, gained and lost.
func answers(t *testing.T, name string, f Family, text string, all []asked, mayGain, mayLose bool) (positive, gained, lost [2]int) {
	t.Helper()
	g := generationOf(t, f, text)
	was, is := g.OldTranslations(f, compareSite{}), nat.New(compareSite{}, g.NatHooks(f))
	if was.Empty() != is.Empty() {
		t.Errorf("%s: empty %t, was %t", name, is.Empty(), was.Empty())
	}
	for _, a := range all {
		for kind := range 2 {
			old, now := was.Translates(OldFlow(a.flow)), is.Translates(a.flow)
			if kind == 1 {
				old, now = was.Masquerades(OldFlow(a.flow), a.backend), is.Masquerades(a.flow, a.backend)
			}
			if now {
				positive[kind]++
			}
			switch {
			case now && !old:
				gained[kind]++
				if !mayGain && (kind == 0 || (compareSite{}).Local(a.flow.Destination.Addr())) {
					t.Errorf("%s: %v by %v, %d: gained", name, a.flow, a.backend, kind)
				}
			case old && !now:
				lost[kind]++
				if !mayLose {
					t.Errorf("%s: %v by %v, %d: lost", name, a.flow, a.backend, kind)
				}
			}
		}
		if t.Failed() {
			t.Fatal(text)
		}
	}
	return positive, gained, lost
}

func TestCompareCorpora(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var sum [3][2]int
	for name, text := range corpora(t) {
		f := IPv4
		if strings.Contains(text, "::") && !strings.Contains(text, "-d 10.") {
			f = IPv6
		}
		p, g, l := answers(t, name, f, text, flowsFor(r, text, 2000), false, false)
		for i := range 2 {
			sum[0][i] += p[i]
			sum[1][i] += g[i]
			sum[2][i] += l[i]
		}
	}
	t.Logf("positive, gained, lost: %v", sum)
}

func someNat(r *rand.Rand, special bool) string {
	pick := func(of ...string) string { return of[r.IntN(len(of))] }
	var b strings.Builder
	b.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\n")
	for i := range 6 {
		fmt.Fprintf(&b, ":C%d - [0:0]\n", i)
	}
	line := func(chain string, from, until int) {
		var m []string
		add := func(in int, s string) {
			if r.IntN(in) == 0 {
				m = append(m, s)
			}
		}
		add(4, pick("-d 10.96.0.10/32", "-d 10.96.0.0/24", "! -d 10.96.0.10/32", "-d 192.0.2.1/32", "-d 10.244.1.2/32"))
		add(5, pick("-s 10.244.0.0/16", "! -s 10.244.0.0/16", "-s 10.244.1.2/32", "-s 198.51.100.7/32"))
		add(9, pick("-i eth0", "-i docker0", "! -i docker0", "-i eth+"))
		add(12, "-o eth0")
		proto := pick("", "", "tcp", "udp")
		if proto != "" {
			m = append(m, "-p "+proto)
			add(2, "-m "+proto+" --dport "+pick("80", "53", "80:90", "1:2000"))
		}
		add(6, pick("-m mark --mark 0x1/0x1", "-m mark --mark 0x2/0x2", "-m mark ! --mark 0x1/0x1", "-m mark --mark 0x0/0x3"))
		add(9, pick("-m statistic --mode random --probability 0.50000000000", "-m quux --quux 1", "-m recent --rcheck --seconds 10 --name X --mask 255.255.255.255 --rsource"))
		if special {
			add(6, pick("-m addrtype --dst-type LOCAL", "-m addrtype --src-type LOCAL", "-m addrtype ! --dst-type LOCAL"))
		}
		target := ""
		switch n := r.IntN(14); {
		case n < 5 && from < until:
			target = pick("-j", "-j", "-g") + fmt.Sprintf(" C%d", from+r.IntN(until-from))
		case n < 7:
			target = pick("-j MARK --set-xmark 0x1/0x1", "-j MARK --set-xmark 0x2/0x2", "-j MARK --set-xmark 0x0/0x1", "-j MARK --set-xmark 0x1/0x0", "-j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff", "-j LOG")
		case n < 9:
			target = "-j " + pick("RETURN", "ACCEPT", "RETURN", "RETURN")
		case special && r.IntN(3) == 0 || !special && from > 3:
			target = pick("-j MASQUERADE", "-j MASQUERADE", "-j RETURN")
			if special {
				target = pick("-j MASQUERADE", "-j MASQUERADE --random-fully", "-j SNAT --to-source 192.0.2.1", "-j SNAT --to-source 10.244.1.2")
			}
		default:
			target = "-j DNAT --to-destination " + pick("10.244.1.2:8080", "10.244.1.2:8080", "10.244.1.3:8080", "10.244.1.2", "10.96.0.10:80", "10.96.0.10", "10.244.1.2-10.244.1.9", "10.244.1.2:80-90")
			if special {
				target = pick(target, target, target, "-j REDIRECT --to-ports 80", "-j NETMAP --to 10.244.1.0/24", "-j FOREIGN")
			}
		}
		b.WriteString("-A " + chain + " " + strings.Join(append(m, target), " ") + "\n")
	}
	for _, c := range []string{"PREROUTING", "OUTPUT"} {
		for range 1 + r.IntN(2) {
			fmt.Fprintf(&b, "-A %s -j C%d\n", c, r.IntN(3))
		}
	}
	fmt.Fprintf(&b, "-A POSTROUTING -j C%d\n", 3+r.IntN(3))
	for i := range 6 {
		for range r.IntN(5) {
			chain := fmt.Sprintf("C%d", i)
			switch {
			case special:
				line(chain, i+1, 6)
			case i < 3:
				line(chain, i+1, 3)
			default:
				line(chain, i+1, 6)
			}
		}
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func TestCompareGenerated(t *testing.T) {
	for _, special := range []bool{false, true} {
		var sum [3][2]int
		for seed := range uint64(30000) {
			r := rand.New(rand.NewPCG(seed, 2))
			text := someNat(r, special)
			p, g, l := answers(t, fmt.Sprint(seed), IPv4, text, flowsFor(r, text, 12), special, special)
			for i := range 2 {
				sum[0][i] += p[i]
				sum[1][i] += g[i]
				sum[2][i] += l[i]
			}
		}
		t.Logf("special %t: positive, gained, lost: %v", special, sum)
	}
}

// usualFlows are flows of a node: to services, to node ports, and to other addresses.
func usualFlows(r *rand.Rand, text string, count int) (all []asked) {
	services := regexp.MustCompile(`-A KUBE-SERVICES .*-p (tcp|udp) .*-d (\S+) .*--dport (\d+)`).FindAllStringSubmatch(text, -1)
	nodePorts := regexp.MustCompile(`-A KUBE-NODEPORTS .*-p (tcp|udp) .*--dport (\d+)`).FindAllStringSubmatch(text, -1)
	for i := range count {
		flow := nat.Flow{Protocol: nat.UDP, Source: netip.MustParseAddrPort("10.1.7.9:4000")}
		switch n := i % 10; {
		case n < 5:
			s := services[r.IntN(len(services))]
			flow.Protocol, flow.Destination = map[string]uint8{"tcp": nat.TCP, "udp": nat.UDP}[s[1]], netip.MustParseAddrPort(s[2]+":"+s[3])
		case n < 6:
			s := nodePorts[r.IntN(len(nodePorts))]
			flow.Protocol, flow.Destination = map[string]uint8{"tcp": nat.TCP, "udp": nat.UDP}[s[1]], netip.MustParseAddrPort("192.0.2.1:"+s[2])
		default:
			flow.Destination = netip.AddrPortFrom(netip.AddrFrom4([4]byte{80, 1, byte(i >> 8), byte(i)}), uint16(1+r.IntN(20000)))
		}
		all = append(all, asked{flow, netip.MustParseAddrPort("10.128.0.9:8080")})
	}
	return all
}

func TestCompareSpeed(t *testing.T) {
	text := string(gunzip(t, "../../hack/bench/heal/testdata/services-5000.rules.gz"))
	g := generationOf(t, IPv4, text)
	r := rand.New(rand.NewPCG(3, 3))
	all := usualFlows(r, text, 20000)
	few := all[:300]
	best := map[string]time.Duration{}
	for range 40 {
		for name, f := range map[string]func(){
			"old make": func() { g.OldTranslations(IPv4, compareSite{}) }, "new make": func() { nat.New(compareSite{}, g.NatHooks(IPv4)) },
			"old few": func() {
				tr := g.OldTranslations(IPv4, compareSite{})
				for _, a := range few {
					tr.Translates(OldFlow(a.flow))
				}
			}, "new few": func() {
				tr := nat.New(compareSite{}, g.NatHooks(IPv4))
				for _, a := range few {
					tr.Translates(a.flow)
				}
			},
			"old translates": func() {
				tr := g.OldTranslations(IPv4, compareSite{})
				for _, a := range all {
					tr.Translates(OldFlow(a.flow))
				}
			}, "new translates": func() {
				tr := nat.New(compareSite{}, g.NatHooks(IPv4))
				for _, a := range all {
					tr.Translates(a.flow)
				}
			}, "old masquerades": func() {
				tr := g.OldTranslations(IPv4, compareSite{})
				for _, a := range all {
					tr.Masquerades(OldFlow(a.flow), a.backend)
				}
			}, "new masquerades": func() {
				tr := nat.New(compareSite{}, g.NatHooks(IPv4))
				for _, a := range all {
					tr.Masquerades(a.flow, a.backend)
				}
			},
		} {
			start := time.Now()
			f()
			if took := time.Since(start); best[name] == 0 || took < best[name] {
				best[name] = took
			}
		}
	}
	for _, what := range []string{"make", "few", "translates", "masquerades"} {
		t.Logf("%s: old %v, new %v, ratio %.2f", what, best["old "+what], best["new "+what], float64(best["new "+what])/float64(best["old "+what]))
	}
}
