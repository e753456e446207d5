package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSparedTables: on legacy canaryd makes no table without protected rules, and
// guards a table that another program makes later.
func TestSparedTables(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		names := func(file string) string { return strings.TrimSpace(nstest.Command(n.T, "cat", "/proc/net/"+file)) }
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A KUBE-FIREWALL -s 192.0.2.1/32 -j DROP\nCOMMIT\n"))
		d := n.Start()
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
		n.Until("one flush", func() error { return flushes(n, 1) })
		if v4, v6 := names("ip_tables_names"), names("ip6_tables_names"); v4 != "filter" || v6 != "" {
			n.Errorf("canaryd made tables: IPv4 has %q, IPv6 %q", v4, v6)
		}

		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv6, "*nat\n:KUBE-SERVICES - [0:0]\n-A OUTPUT -j KUBE-SERVICES\n-A KUBE-SERVICES -p tcp -j RETURN\nCOMMIT\n"))
		saved := func(want string) func() error {
			return func() error {
				save, err := n.Programs.Save(n.Context(), rules.IPv6)
				if err == nil && !strings.Contains(save, want) {
					err = fmt.Errorf("iptables-save has no %s:\n%s", want, save)
				}
				return err
			}
		}
		n.Until("a canary in the new table", saved("-A "+canary.DefaultChain))
		n.Until("health", nodetest.Ready)
		n.Must(n.Programs.Flush(n.Context(), rules.IPv6, rules.Nat, ""))
		n.Until("the new table's rules", saved("-A KUBE-SERVICES -p tcp"))
		n.Until("two flushes", func() error { return flushes(n, 2) })
		d.Stop()
	})
}

// flushes returns an error unless canaryd has answered that many flushes.
func flushes(n *nodetest.Node, want int) error {
	if got := n.Status().Flushes; len(got) != want || got[0].Outcome != "proved" {
		return fmt.Errorf("the flush records are %+v, want %d", got, want)
	}
	return nodetest.Ready()
}
