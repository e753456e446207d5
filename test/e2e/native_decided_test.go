package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// ownFirewall is a table that a word names.
const ownFirewall = `table inet fw {
	chain input { type filter hook input priority 0; tcp dport 23 drop; tcp dport 24 drop; jump ours; }
	chain fw2 { type filter hook output priority 0; tcp dport 25 drop; }
	chain fw3 { type filter hook forward priority 0; tcp dport 26 drop; }
	chain ours { tcp dport 27 accept; }
}
`

// TestDeletedByName: a person deletes a chain or a rule by its name or handle, in a table that a
// word names and in an owner's. canaryd says it, with the process, and leaves it so. A flush of the
// table afterwards is healed without it.
func TestDeletedByName(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nodetest.On(t, backend, func(n *nodetest.Node) {
				nstest.NeedProgram(n.T, "nft")
				n.Load()
				n.LoadNative(100)
				nstest.CommandInput(n.T, ownFirewall, "nft", "-f", "-")
				n.Start("--protect=kube,nft:inet:fw")
				for _, decision := range []struct{ name, table, chain, command string }{
					{"a base chain", "inet fw", "fw2", "nft delete chain inet fw fw2"},
					{"a chain that was emptied in the same commit", "inet fw", "fw3", "nft 'flush chain inet fw fw3; delete chain inet fw fw3'"},
					{"the only rule of a chain", "inet fw", "ours", "nft delete rule inet fw ours handle HANDLE"},
					{"the only rule of kube-proxy's chain", "ip kube-proxy", "nat-prerouting", "nft delete rule ip kube-proxy nat-prerouting handle HANDLE"},
				} {
					command := strings.Replace(decision.command, "HANDLE", onlyHandle(n, decision.table, decision.chain), 1)
					nstest.Command(n.T, "sh", "-c", command+"; true") // the shell waits
					said := fmt.Sprintf("table %s %s lost one rule, 0 left", decision.table, decision.chain)
					n.Until(decision.name+" to be accepted", func() error {
						stdout, _ := n.Want(0, "status")
						for line := range strings.Lines(stdout) {
							if strings.Contains(line, said) && strings.Contains(line, "nft") && strings.Contains(line, "pid ") {
								return nodetest.Ready()
							}
						}
						return fmt.Errorf("no line of %q with the process in\n%s", said, stdout)
					})
				}
				if s := n.Status(); len(s.Flushes) != 0 || !s.Healthy {
					n.Errorf("healthy %t with %d records, for what a person decided", s.Healthy, len(s.Flushes))
				}
				decided := nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "fw")
				for _, gone := range []string{"chain fw2", "chain fw3", "dport 27"} {
					if strings.Contains(decided, gone) {
						n.Errorf("%s is back:\n%s", gone, decided)
					}
				}
				nstest.Command(n.T, "nft", "flush", "table", "inet", "fw")
				n.Healed(1)
				if got := nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "fw"); got != decided {
					n.Errorf("after a flush the table is\n%s\nwant\n%s", got, decided)
				}
			})
		})
	}
}

// onlyHandle returns the handle of a chain's only rule.
func onlyHandle(n *nodetest.Node, table, chain string) string {
	n.Helper()
	words := append([]string{"-a", "list", "chain"}, append(strings.Fields(table), chain)...)
	found := regexp.MustCompile(`# handle (\d+)`).FindAllStringSubmatch(nstest.Command(n.T, "nft", words...), -1)
	if len(found) < 2 { // the table's or the chain's, and the rule's
		n.Fatalf("no rule in chain %s", chain)
	}
	return found[len(found)-1][1]
}

// TestMapReplaced: one commit takes all elements of kube-proxy's map and adds one. The elements
// come back, and the one that was added stays.
func TestMapReplaced(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		n.Start(guardNative)
		want := listed(n)
		const added = "203.0.113.77 . tcp . 80"
		nstest.CommandInput(n.T, "flush map ip kube-proxy service-ips\nadd element ip kube-proxy service-ips { "+added+" : drop }\n", "nft", "-f", "-")
		if f := n.Healed(1); f.Outcome != "proved" || f.Kind != "emptied" {
			n.Errorf("the record says %+v", f)
		}
		nstest.Command(n.T, "nft", "get", "element", "ip", "kube-proxy", "service-ips", "{ "+added+" }")
		nstest.Command(n.T, "nft", "delete", "element", "ip", "kube-proxy", "service-ips", "{ "+added+" }")
		if got := listed(n); got != want {
			n.Errorf("without the element that was added the table has %d bytes of nft's text, want %d", len(got), len(want))
		}
	})
}
