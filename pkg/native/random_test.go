package native_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// randomTables is the number of random tables that a test tries.
var randomTables = testkit.Size(8, 25)

// A generator makes tables that nft accepts.
type generator struct {
	*rand.Rand
	chains, sets, vmaps []string
}

func (g *generator) pick(from []string) string { return from[g.IntN(len(from))] }

func (g *generator) address() string {
	return fmt.Sprintf("10.%d.%d.%d", g.IntN(3), g.IntN(3), g.IntN(250))
}

func (g *generator) several(n int, f func() string) string {
	all := map[string]bool{}
	for range 1 + g.IntN(n) {
		all[f()] = true
	}
	var list []string
	for s := range all {
		list = append(list, s)
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}

func (g *generator) port() string { return fmt.Sprint(1 + g.IntN(9000)) }

// target returns a verdict. Chains lead to later chains only, so that there are no loops.
func (g *generator) target(from int) string {
	if from+1 < len(g.chains) && g.IntN(2) == 0 {
		return g.pick([]string{"jump ", "goto "}) + g.pick(g.chains[from+1:])
	}
	return g.pick([]string{"accept", "drop", "return"})
}

func (g *generator) vmap(from int) string {
	keys := map[string]bool{}
	var list []string
	for range 1 + g.IntN(5) {
		if k := g.port(); !keys[k] {
			keys[k] = true
			list = append(list, k+" : "+g.target(from))
		}
	}
	return "{ " + strings.Join(list, ", ") + " }"
}

func (g *generator) rule(from int) string {
	matches := []string{
		"ip saddr " + g.address(), "ip saddr != { " + g.several(4, g.address) + " }", "ip daddr @" + g.pick(g.sets),
		"tcp dport { " + g.several(6, g.port) + " }", "udp dport vmap " + g.vmap(from), "meta mark set " + g.port(),
		"ct state new", "counter packets 3 bytes 9", "limit rate " + g.port() + "/minute", "update @seen { ip saddr timeout 1m counter }",
		`iifname { "lo", "eth` + g.port() + `" }`, "quota over " + g.port() + " kbytes", "meta l4proto tcp", `log prefix "` + g.port() + `"`,
		"tcp dport vmap @" + g.pick(g.vmaps), "ip saddr . tcp dport { " + g.several(3, func() string { return g.address() + " . " + g.port() }) + " }",
		"tcp dport " + g.port() + " jump { tcp dport { " + g.several(3, g.port) + " } " + g.target(from) + "; }",
	}
	said := g.pick(matches)
	switch {
	case strings.Contains(said, "@vmap") && from == len(g.chains)-1: // to which these maps lead
		return "accept"
	case strings.Contains(said, "vmap") || strings.Contains(said, "jump {"):
		return said
	case g.IntN(3) == 0:
		said += " counter"
	}
	said += " " + g.target(from)
	if g.IntN(3) == 0 {
		said += ` comment "` + g.port() + `"`
	}
	return said
}

// table returns a table in nft's language.
func (g *generator) table(name string) string {
	g.chains, g.sets, g.vmaps = nil, nil, nil
	for i := range 2 + g.IntN(6) {
		g.chains = append(g.chains, fmt.Sprintf("chain%d", i))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n\tset seen { type ipv4_addr; size 99; flags dynamic,timeout; }\n", name)
	for i := range 1 + g.IntN(4) {
		set := fmt.Sprintf("set%d", i)
		g.sets = append(g.sets, set)
		body := "type ipv4_addr; elements = { " + g.several(9, g.address) + " };"
		switch g.IntN(4) {
		case 0:
			body = "type ipv4_addr; flags interval; elements = { 10." + g.port()[:1] + ".0.0/16, 192.168.0.0-192.168.1.7, " + fmt.Sprintf("172.16.%d.0/24", g.IntN(200)) + " };"
		case 1:
			body = "type ipv4_addr; timeout 3h; elements = { " + g.several(5, g.address) + " };"
		case 2:
			body = "type ipv4_addr; flags interval,timeout; timeout 3h; elements = { 10." + g.port()[:1] + ".0.0/16, 192.168.0.0/24 timeout 1h };"
		}
		fmt.Fprintf(&b, "\tset %s { %s }\n", set, body)
	}
	for i := range 1 + g.IntN(2) {
		name := fmt.Sprintf("vmap%d", i)
		g.vmaps = append(g.vmaps, name)
		fmt.Fprintf(&b, "\tmap %s { type inet_service : verdict; elements = %s; }\n", name, g.vmap(len(g.chains)-2))
	}
	for i, chain := range g.chains {
		fmt.Fprintf(&b, "\tchain %s {\n", chain)
		if i == 0 {
			fmt.Fprintf(&b, "\t\ttype filter hook input priority %d; policy accept;\n", g.IntN(100))
		}
		for range g.IntN(7) {
			fmt.Fprintf(&b, "\t\t%s\n", g.rule(i))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// TestRandomTablesComeBack flushes and replays random tables, one after the other.
func TestRandomTablesComeBack(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		for seed := range uint64(randomTables) {
			g := &generator{Rand: rand.New(rand.NewPCG(seed, 17))}
			text := g.table("one") + g.table("two")
			nstest.Command(t, "nft", "flush", "ruleset")
			nstest.CommandInput(t, text, "nft", "-f", "-")
			before, was := nstest.Command(t, "nft", "-s", "list", "ruleset"), capture(t, conn)
			nstest.Command(t, "nft", "flush", "ruleset")
			replay(t, conn, was)
			if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
				t.Errorf("nft lists (-before +after):\n%.4000s", diff)
			}
			sameRaw(t, was, capture(t, conn))
			if t.Failed() {
				t.Fatalf("seed %d:\n%s", seed, text)
			}
		}
	})
}
