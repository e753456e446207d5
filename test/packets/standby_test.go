package packets

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
)

// A remainder is the part of the real rules that exists while the standby is
// open.
type remainder struct {
	name string
	take func(t *testing.T, n *node, f rules.Family)
	// losses are the losses that the probe has to find.
	losses map[standby.Hook]standby.Loss
}

func remainders() []remainder {
	const below, gone = standby.Below, standby.Gone
	nat := func(args ...string) func(t *testing.T, n *node, f rules.Family) {
		return func(t *testing.T, n *node, f rules.Family) {
			n.iptables(t, f, append([]string{"-t", "nat"}, args...)...)
		}
	}
	return []remainder{
		{"of nat stands nothing", func(t *testing.T, n *node, f rules.Family) {
			nstest.Command(t, "nft", "delete", "table", f.NFT(), "nat")
		}, map[standby.Hook]standby.Loss{standby.Prerouting: gone, standby.Output: gone, standby.Postrouting: gone}},
		{"of nat stands everything", func(*testing.T, *node, rules.Family) {}, map[standby.Hook]standby.Loss{}},
		{"chains stand empty", nat("-F"), map[standby.Hook]standby.Loss{standby.Prerouting: gone, standby.Output: gone, standby.Postrouting: gone}},
		{"KUBE-SERVICES is empty", nat("-F", "KUBE-SERVICES"), map[standby.Hook]standby.Loss{standby.Prerouting: below, standby.Output: below}},
		{"KUBE-POSTROUTING is empty", nat("-F", "KUBE-POSTROUTING"), map[standby.Hook]standby.Loss{standby.Postrouting: below}},
		{"PREROUTING is empty", nat("-F", "PREROUTING"), map[standby.Hook]standby.Loss{standby.Prerouting: gone}},
	}
}

// TestPacketsThroughTheStandby: with the standby open each connection must end as
// with all real rules, from the same source, whichever of them remain. No mark
// may be left.
func TestPacketsThroughTheStandby(t *testing.T) {
	for _, r := range remainders() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "ip", "nft", "iptables-nft", "ip6tables-nft")
				n := newNode(t, iptables.NFT)
				n.load(options())
				s, err := standby.Dial(standby.Config{})
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				for _, f := range rules.Families() {
					n.standIn(t, s, f, r)
				}
				n.refusals()
				n.perProtocol("through the standby", func(t *testing.T, f rules.Family, protocol string) {
					var proved table
					for _, a := range attempts() {
						n.prove(t, f, protocol, a, &proved)
					}
					for _, by := range []way{clusterIP, nodePort} {
						n.spreads(t, f, protocol, by, &proved)
						n.keepsAffinity(t, f, protocol, by, &proved)
					}
				})
				for _, f := range rules.Families() {
					n.leavesNoMark(t, f)
				}
			})
		})
	}
}

// standIn copies the family's rules, takes some away, and opens the hooks that
// the probe allows. If nothing is lost it opens all hooks.
func (n *node) standIn(t *testing.T, s *standby.Standby, f rules.Family, r remainder) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	nstest.CommandInput(t, strings.ReplaceAll(markCounter, "FAMILY", f.NFT()), "nft", "-f", "-")
	conn, err := nft.Dial()
	must(err)
	defer conn.Close()
	raw, found, err := conn.RawTable(f.Table("nat"))
	if must(err); !found {
		t.Fatal("there is no nat")
	}
	protects := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
	c, err := standby.Translate(standby.Source{RawTable: raw, Protects: protects}, nil)
	must(err)
	if left := c.LeftOut(); len(left) > 0 {
		t.Fatalf("chains are left out: %v", left)
	}
	must(s.Put(c))
	r.take(t, n, f)
	losses, err := c.Probe(conn)
	must(err)
	for _, h := range c.Hooks() {
		if losses[h] != r.losses[h] {
			t.Errorf("%s %s: %v, want %v", f, h, losses[h], r.losses[h])
		}
	}
	hooks, shut := c.Openable(losses)
	if len(shut) > 0 {
		t.Fatalf("%v stay shut", shut)
	}
	if len(r.losses) == 0 {
		hooks = c.Hooks()
	}
	must(s.Open(f.Table("nat"), hooks, nil))
}

// markCounter counts packets that leave the node with kube-proxy's mark.
const markCounter = `table FAMILY marked {
	chain leaving {
		type filter hook postrouting priority 300;
		meta mark & 0x4000 != 0 counter comment "marked"
	}
}
`

// leavesNoMark: the rules that set kube-proxy's mark must have cleared it again.
func (n *node) leavesNoMark(t *testing.T, f rules.Family) {
	t.Helper()
	if text := nstest.Command(t, "nft", "list", "table", f.NFT(), "marked"); !strings.Contains(text, "counter packets 0 bytes 0") {
		t.Errorf("%s: packets left with the mark:\n%s", f, text)
	}
}
