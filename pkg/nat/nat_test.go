package nat_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/canaryd/canaryd/pkg/nat"
)

// A chain is a chain of rules for tests.
type chain []*rule

func (c *chain) Candidates(netip.AddrPort) (all [3][]int32) {
	for i := range *c {
		all[1] = append(all[1], int32(i))
	}
	return all
}

// A rule matches packets whose mark has value in the bits of mask. If it depends on more, it may
// match or not. It sets the bits of set, clears those of clear, and then has the effect of way.
type rule struct {
	mask, value, set, clear uint32
	depends                 bool
	way                     nat.Way
}

func (c *chain) Ways(place int32, p *nat.Packet, ways []nat.Way) []nat.Way {
	r := (*c)[place]
	if (p.Mark.Value^r.value)&r.mask&p.Mark.Known != 0 {
		return ways
	}
	if r.depends || r.mask&^p.Mark.Known != 0 {
		ways = append(ways, nat.Way{Mark: p.Mark})
	}
	way := r.way
	way.Mark = nat.Mark{Known: p.Mark.Known | r.set | r.clear, Value: (p.Mark.Value | r.set) &^ r.clear}
	return append(ways, way)
}

// A kernel takes packets through the same rules. Chance decides each condition that depends on
// more.
type kernel struct {
	*rand.Rand
	mark uint32
}

// through returns the way on which the packet leaves a chain: by a translation, by Leave, or by
// Return.
func (k *kernel) through(c nat.Chain) nat.Way {
	for _, r := range *c.(*chain) {
		if k.mark&r.mask != r.value || r.depends && k.IntN(2) == 0 {
			continue
		}
		k.mark = (k.mark | r.set) &^ r.clear
		switch end := r.way; end.Verdict {
		case nat.Next:
		case nat.Jump, nat.Goto:
			if inner := k.through(end.Chain); inner.Verdict != nat.Return || end.Verdict == nat.Goto {
				return inner
			}
		default:
			return end
		}
	}
	return nat.Way{Verdict: nat.Return}
}

// throughAll returns the way on which the packet leaves the base chains of a hook. The first
// translation is the last.
func (k *kernel) throughAll(chains ...*chain) (end nat.Way) {
	for _, c := range chains {
		if end = k.through(c); end.Verdict != nat.Return && end.Verdict != nat.Leave {
			break
		}
	}
	return end
}

// someSite is a node with the address 192.0.2.1.
type someSite struct{}

func (someSite) Local(a netip.Addr) bool {
	return a.IsLoopback() || a == netip.MustParseAddr("192.0.2.1")
}
func (someSite) Beyond(string, netip.Addr) bool { return true }

func flow(from, to string) nat.Flow {
	return nat.Flow{Protocol: nat.TCP, Source: netip.MustParseAddrPort(from), Destination: netip.MustParseAddrPort(to)}
}

func place(at string) nat.Place {
	if addr, err := netip.ParseAddr(at); err == nil {
		return nat.Place{Addr: addr}
	}
	p := netip.MustParseAddrPort(at)
	return nat.Place{Addr: p.Addr(), Port: int32(p.Port())}
}

const client, service, backend = "198.51.100.7:4000", "10.96.0.10:80", "10.244.1.2:8080"

// someChains makes chains that lead to later chains, by chance.
func someChains(r *rand.Rand) []*chain {
	all := make([]*chain, 5)
	for i := range all {
		all[i] = &chain{}
	}
	places := []nat.Place{place(backend), place(backend), place("10.244.1.3:8080"), place("10.244.1.2"), place("10.96.0.10:81"), place(service), {}}
	for i, c := range all {
		for range 1 + r.IntN(4) {
			one := &rule{depends: r.IntN(3) == 0}
			if r.IntN(3) == 0 {
				one.mask = uint32(1) << r.IntN(2)
				one.value = one.mask * uint32(r.IntN(2))
			}
			switch n := r.IntN(14); {
			case n < 3:
				one.set = uint32(1) << r.IntN(2)
			case n < 5:
				one.clear = uint32(1) << r.IntN(2)
			case n < 8 && i < len(all)-1:
				one.way = nat.Way{Verdict: []nat.Verdict{nat.Jump, nat.Goto}[r.IntN(2)], Chain: all[i+1+r.IntN(len(all)-1-i)]}
			case n < 11:
				one.way = nat.Way{Verdict: nat.DNAT, To: places[r.IntN(len(places))]}
			case n < 12:
				one.way = nat.Way{Verdict: nat.SNAT, To: nat.Place{Addr: netip.MustParseAddr([]string{"198.51.100.7", "192.0.2.1"}[r.IntN(2)])}}
			default:
				one.way.Verdict = []nat.Verdict{nat.Masquerade, nat.Masquerade, nat.Return, nat.Leave}[r.IntN(4)]
			}
			*c = append(*c, one)
		}
	}
	return all
}

// TestAnswersAreCertain: a kernel takes the packet through the same rules many times, with other
// marks and other outcomes of the unknown conditions. It must never contradict a positive answer.
func TestAnswersAreCertain(t *testing.T) {
	translated, masqueraded := 0, 0
	for seed := range uint64(50000) {
		random := rand.New(rand.NewPCG(seed, 1))
		pre, post := someChains(random), someChains(random)
		for _, c := range pre { // a masquerade there ends the packet's path for the kernel
			for _, r := range *c {
				if r.way.Verdict == nat.Masquerade && random.IntN(3) > 0 {
					r.way = nat.Way{Verdict: nat.DNAT, To: place(backend)}
				}
			}
		}
		first, second := []*chain{pre[0]}, []*chain{post[0]}
		if random.IntN(3) == 0 {
			first, second = append(first, pre[2]), append(second, post[2])
		}
		hooks := nat.Hooks{}
		for i := range first { // in another order than the kernel's
			hooks[nat.Prerouting] = append([]nat.Chain{first[i]}, hooks[nat.Prerouting]...)
			hooks[nat.Postrouting] = append([]nat.Chain{second[i]}, hooks[nat.Postrouting]...)
		}
		tr := nat.New(someSite{}, hooks)
		f := flow(client, service)
		translates, masquerades := tr.Translates(f), tr.Masquerades(f, netip.MustParseAddrPort(backend))
		for range 30 {
			k := &kernel{random, random.Uint32N(4)}
			end := k.throughAll(first...)
			if end.Verdict == nat.DNAT && end.To == (nat.Place{}) {
				end.To = place([]string{backend, service}[random.IntN(2)])
			}
			elsewhere := end.Verdict == nat.DNAT && end.To != place(service)
			if translates && !elsewhere {
				t.Fatalf("%d: the flow is certainly translated, and ended by %v", seed, end)
			}
			if end.Verdict != nat.DNAT || end.To != place(backend) {
				continue
			}
			out := k.throughAll(second...)
			if masquerades && out.Verdict != nat.Masquerade && (out.Verdict != nat.SNAT || out.To == place("198.51.100.7")) {
				t.Fatalf("%d: the flow is certainly masqueraded, and ended by %v", seed, out)
			}
		}
		if translates {
			translated++
		}
		if masquerades {
			masqueraded++
		}
	}
	t.Logf("certainly translated %d, masqueraded %d", translated, masqueraded)
	if translated < 1000 || masqueraded < 500 {
		t.Errorf("too few positive answers to test: %d, %d", translated, masqueraded)
	}
}

func way(v nat.Verdict) *rule { return &rule{way: nat.Way{Verdict: v}} }

func dnat(to string) *rule { return &rule{way: nat.Way{Verdict: nat.DNAT, To: place(to)}} }

// TestTranslates has the answers of single ways to end.
func TestTranslates(t *testing.T) {
	maybe := &rule{depends: true, way: nat.Way{Verdict: nat.Unclear}}
	anyPort, anywhere := &rule{way: nat.Way{Verdict: nat.DNAT, To: nat.Place{Addr: netip.MustParseAddr("10.96.0.10"), Port: nat.AnyPort}}}, way(nat.DNAT)
	loop := &chain{}
	*loop = chain{{way: nat.Way{Verdict: nat.Jump, Chain: loop}}}
	tests := []struct {
		story string
		chain chain
		want  bool
	}{
		{"to another address", chain{dnat("10.244.1.2")}, true},
		{"to another port of the same address", chain{dnat("10.96.0.10:81")}, true},
		{"to itself", chain{dnat(service)}, false},
		{"to its address, with its port", chain{dnat("10.96.0.10")}, false},
		{"to its address, with some port", chain{anyPort}, false},
		{"to an unknown place", chain{anywhere}, false},
		{"by nothing", chain{}, false},
		{"by a masquerade, which is no translation of a destination", chain{way(nat.Masquerade)}, false},
		{"after something unclear", chain{maybe, dnat(backend)}, false},
		{"after a jump to a chain that is not known", chain{way(nat.Jump), dnat(backend)}, false},
		{"after a loop, which the kernel refuses", chain{{way: nat.Way{Verdict: nat.Jump, Chain: loop}}, dnat(backend)}, false},
		{"after an unknown verdict", chain{way(99), dnat(backend)}, false},
	}
	for _, test := range tests {
		tr := nat.New(someSite{}, nat.Hooks{nat.Prerouting: {&test.chain}})
		if got := tr.Translates(flow(client, service)); got != test.want {
			t.Errorf("%s: translated for sure: %t, want %t", test.story, got, test.want)
		}
		if tr.Translates(flow("192.0.2.1:4000", service)) {
			t.Errorf("%s: a flow of the node is translated before routing", test.story)
		}
	}
}

// TestAllWaysToABackendCount: the base chains of all kinds of rules may lead to a backend.
func TestAllWaysToABackendCount(t *testing.T) {
	marked, unmarked := &chain{{set: 1}, dnat(backend)}, &chain{dnat(backend)}
	masquerade := nat.Hooks{nat.Postrouting: {&chain{{mask: 1, value: 1, way: nat.Way{Verdict: nat.Masquerade}}}}}
	for story, test := range map[string]struct {
		chains []nat.Chain
		want   bool
	}{
		"one with the mark": {[]nat.Chain{marked}, true}, "one without": {[]nat.Chain{unmarked}, false}, "both": {[]nat.Chain{marked, unmarked}, false},
		"a second chain leads elsewhere": {[]nat.Chain{marked, &chain{dnat("10.244.1.2:8081")}}, true}, "a second chain may lead there": {[]nat.Chain{marked, &chain{way(nat.DNAT)}}, false},
		"a second chain is unclear": {[]nat.Chain{marked, &chain{way(nat.Unclear)}}, false},
	} {
		hooks := []nat.Hooks{masquerade}
		for _, c := range test.chains {
			hooks = append(hooks, nat.Hooks{nat.Prerouting: {c}, nat.Output: {c}})
		}
		for from, local := range map[string]bool{client: false, "127.0.0.1:4000": false, "192.0.2.1:4000": true} {
			if got := nat.New(someSite{}, hooks...).Masquerades(flow(from, service), netip.MustParseAddrPort(backend)); got != (test.want && !local) {
				t.Errorf("%s, from %s: masqueraded for sure: %t", story, from, got)
			}
		}
	}
}

// TestTheFirstTranslationCounts: of two base chains of a hook, the kernel runs one first. A
// translation there to the same place is the last.
func TestTheFirstTranslationCounts(t *testing.T) {
	certain := &chain{dnat(backend)}
	for story, test := range map[string]struct {
		other chain
		want  bool
	}{
		"none": {chain{}, true}, "to another backend": {chain{dnat("10.244.1.3:8080")}, true}, "to itself": {chain{dnat(service)}, false},
		"anywhere": {chain{way(nat.DNAT)}, false}, "perhaps to itself": {chain{{depends: true, way: dnat(service).way}}, false},
		"not known": {chain{way(nat.Unclear)}, false}, "accepted": {chain{way(nat.Leave)}, true},
	} {
		for _, chains := range [][]nat.Chain{{certain, &test.other}, {&test.other, certain}} {
			if got := nat.New(someSite{}, nat.Hooks{nat.Prerouting: chains}).Translates(flow(client, service)); got != test.want {
				t.Errorf("%s: translated for sure: %t, want %t", story, got, test.want)
			}
		}
	}
}

// TestABackendOnTheNode: a packet from outside to the node itself passes no Postrouting. A packet
// of the node does.
func TestABackendOnTheNode(t *testing.T) {
	const here = "192.0.2.1:8080"
	chains := []nat.Chain{&chain{dnat(here)}}
	tr := nat.New(someSite{}, nat.Hooks{nat.Prerouting: chains, nat.Output: chains, nat.Postrouting: {&chain{way(nat.Masquerade)}}})
	for from, want := range map[string]bool{client: false, "127.0.0.1:4000": true} {
		if got := tr.Masquerades(flow(from, service), netip.MustParseAddrPort(here)); got != want {
			t.Errorf("from %s: masqueraded for sure: %t, want %t", from, got, want)
		}
	}
}

// TestStrangeRulesEndTheWalk: rules lead to one another in ever more ways. This must end the
// walk, not the daemon. Such a flow must not use up the steps of the others.
func TestStrangeRulesEndTheWalk(t *testing.T) {
	var next chain
	for range 15 {
		inner := slices.Clone(next)
		next = nil
		for range 8 {
			next = append(next, &rule{way: nat.Way{Verdict: nat.Jump, Chain: &inner}})
		}
	}
	strange := slices.Concat(chain{{mask: 1, value: 1, way: nat.Way{Verdict: nat.Goto, Chain: &next}}}, chain{dnat(backend)})
	first := chain{&rule{set: 1}, &rule{way: nat.Way{Verdict: nat.Goto, Chain: &strange}}}
	tr := nat.New(someSite{}, nat.Hooks{nat.Prerouting: {&first}, nat.Output: {&chain{dnat(backend)}}})
	for range 100 {
		if tr.Translates(flow(client, service)) {
			t.Fatal("a flow is sure to be translated that was not followed to the end")
		}
		if !tr.Translates(flow("192.0.2.1:4000", service)) {
			t.Fatal("the steps of a strange flow count for others")
		}
	}
	if !nat.New(someSite{}, nil).Empty() || tr.Empty() {
		t.Error("Empty disagrees with the rules")
	}
}
