package limits

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// blocklist returns a native table with so many elements.
func blocklist(elements int) string {
	var b strings.Builder
	b.WriteString("table inet blocklist {\n set addresses { type ipv4_addr; }\n chain input { type filter hook input priority 0; ip saddr @addresses drop; }\n}\n")
	for i := range elements {
		switch {
		case i%1000 == 0 && i > 0:
			b.WriteString("}\n")
			fallthrough
		case i == 0:
			b.WriteString("add element inet blocklist addresses { ")
		}
		fmt.Fprintf(&b, "11.%d.%d.%d, ", i>>16, i>>8&255, i&255)
	}
	return b.String() + "}\n"
}

// TestANativeTableThatIsTooLargeCostsItselfOnly: canaryd breaks off the read of such a table, and
// names it. After a flush it restores all others, and the node is not healthy until the owner
// writes the table. It guards the table once it is small.
func TestANativeTableThatIsTooLargeCostsItselfOnly(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(t, "nft")
		n.Load()
		const fw = "table inet fw {\n chain input { type filter hook input priority 0; tcp dport 9 drop; }\n}\n"
		nstest.CommandInput(n.T, fw+blocklist(200_000), "nft", "-f", "-")
		p := n.Start("--max-rules=1000", "--protect=kube,cni,nft:inet:fw,nft:inet:blocklist")
		says := func(headline string, lines ...string) {
			n.Helper()
			n.Until("canaryd status to say "+headline, func() error {
				_, text, _ := n.Canaryd("status")
				for _, want := range append(lines, headline+"\n") {
					if !strings.Contains(text, want) {
						return fmt.Errorf("it does not say %q:\n%s", want, text)
					}
				}
				return nil
			})
		}
		leftOut := func() {
			n.Helper()
			says("healthy, but one native table is not guarded", "NOT guarded: table inet blocklist: it is as large as ", "inet fw ")
		}
		leftOut()
		p.WantLog("A native table is left out: it is NOT guarded", "inet blocklist", "--max-rules")
		if got := n.Metrics()["native_tables_not_guarded{}"]; got != 1 {
			n.Errorf("native_tables_not_guarded is %v, want 1", got)
		}
		if mib := peak(n, p) >> 10; mib > 40 { // 23 MiB; 50 MiB with the whole table
			n.Errorf("a peak of %d MiB", mib)
		}

		nstest.Command(n.T, "nft", "flush", "ruleset")
		says("NOT healthy: table inet blocklist is table_deleted", "only its owner can put it back", "inet fw ")
		if text := nstest.Command(n.T, "nft", "list tables"); !strings.Contains(text, "inet fw") || strings.Contains(text, "blocklist") {
			n.Errorf("the kernel has %s", text)
		}
		nstest.CommandInput(n.T, blocklist(200_000), "nft", "-f", "-")
		leftOut()
		nstest.CommandInput(n.T, "delete table inet blocklist\n"+blocklist(11), "nft", "-f", "-")
		says("healthy", "inet blocklist ")
		nstest.Command(n.T, "nft", "flush", "ruleset")
		n.Until("the small table to be back", func() error {
			if text := nstest.Command(n.T, "nft", "list ruleset"); !strings.Contains(text, "11.0.0.10") {
				return fmt.Errorf("the kernel has %.2000s", text)
			}
			return nil
		})
		says("healthy", "inet blocklist ")
	})
}
