package faults

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// nft runs a script of nft's.
func nft(n *nodetest.Node, text string) {
	n.Helper()
	cmd := exec.CommandContext(n.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		n.Fatalf("%s: %v: %s", text, err, out)
	}
}

// TestAChainThatIsNoneOfIptables: a file declares a chain with a built-in chain's name in which
// no jump works. canaryd writes nothing into it, restores all other tables, and reports the
// reason. It restores the table once that chain is gone.
func TestAChainThatIsNoneOfIptables(t *testing.T) {
	tests := []struct{ name, table, says, mend string }{
		{"another hook", "chain PREROUTING { type nat hook postrouting priority -100; }", "hook postrouting", "delete chain ip nat PREROUTING"},
		{"another type", "chain POSTROUTING { type filter hook postrouting priority 100; }", "type filter", "delete chain ip nat POSTROUTING"},
		{"no hook", "chain PREROUTING {\n}", "has no hook", "delete chain ip nat PREROUTING"},
		{"dormant", "flags dormant\nchain PREROUTING { type nat hook prerouting priority -100; }", "is dormant", "add table ip nat"},
	}
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		whole := n.Protected()
		d := start(n)
		for _, test := range tests {
			records := len(n.Status().Flushes)
			nft(n, "flush ruleset\ntable ip nat {\n"+test.table+"\n}")
			n.Until(test.name+": all but one table to be back", func() error {
				s := n.Status()
				if len(s.Flushes) != records+1 || s.Flushes[0].Attempts < 2 {
					return fmt.Errorf("flush records %+v", s.Flushes)
				}
				for f, tables := range s.Families {
					for table, verdict := range tables {
						if one := f.NFT() == "ip" && table == "nat"; one == (verdict == "intact") {
							return fmt.Errorf("%s %s is %s", f, table, verdict)
						}
					}
				}
				return nil
			})
			for line := range strings.Lines(output(n, "nft", "-s", "list", "table", "ip", "nat")) {
				if strings.Contains(line, "jump") || strings.Contains(line, "canaryd") {
					n.Errorf("%s: canaryd wrote %s", test.name, line)
				}
			}
			record := n.Status().Flushes[0]
			if !strings.Contains(record.Detail, test.says) || record.Lost.Rules == 0 || notReady() != nil {
				n.Errorf("%s: record %+v", test.name, record)
			}
			if n.Status().Healthy {
				n.Errorf("%s: healthy", test.name)
			}
			if records == 0 { // later flushes are so frequent that not each has a line
				d.daemon.WantLog("Rules are still missing", test.says)
			}
			nft(n, test.mend)
			n.Healed(records + 1)
			n.Same(test.name+": protected rules", whole, n.Protected())
		}
		d.daemon.Stop()
	})
}

// output returns a program's standard output.
func output(n *nodetest.Node, name string, args ...string) string {
	n.Helper()
	out, err := exec.CommandContext(n.Context(), name, args...).Output()
	n.Must(err)
	return string(out)
}
