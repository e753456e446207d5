package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestFlushAndPolicyDrop: a script flushes filter and closes FORWARD. All that is protected
// is back, and every face says that the chain is closed, until it is opened again.
func TestFlushAndPolicyDrop(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nodetest.On(t, backend, func(n *nodetest.Node) {
				n.Load()
				program := "iptables-" + string(backend)
				nstest.Command(n.T, program, "-P", "FORWARD", "ACCEPT")
				protected := n.Protected()
				d := n.Start()
				nstest.Command(n.T, "sh", "-c", strings.ReplaceAll("iptables -F; iptables -X; iptables -P FORWARD DROP", "iptables", program))
				const text = "policy of ipv4 filter FORWARD is DROP since flush 1; canaryd sets none"
				n.Until("the headline", func() error {
					code, stdout, _ := n.Canaryd("status")
					if line, _, _ := strings.Cut(stdout, "\n"); code != 0 || line != "healthy, but "+text {
						return fmt.Errorf("exit code %d, %q", code, line)
					}
					return nil
				})
				n.Same("protected rules", protected, n.Protected())
				for path, wants := range map[string]string{"/readyz": "ok, but " + text, "/": "Healthy, but " + text, "/metrics": `canaryd_policy_drops{family="ipv4",table="filter"} 1`} {
					if got := n.Get(path); !strings.Contains(got, wants) {
						n.Errorf("%s lacks %q", path, wants)
					}
				}
				d.WantLog("The policy of a built-in chain has become DROP")
				nstest.Command(n.T, program, "-P", "FORWARD", "ACCEPT")
				n.Until("the headline of before", func() error {
					if _, stdout, _ := n.Canaryd("status"); !strings.HasPrefix(stdout, "healthy\n") {
						return fmt.Errorf("%s", stdout)
					}
					return nil
				})
				d.Stop()
			})
		})
	}
}

// TestNativePolicyDrop: another process closes a base chain of a native table that stays, alone or
// with a flush of the table. The rules are back, and every face says that the chain is closed,
// until it is opened again.
func TestNativePolicyDrop(t *testing.T) {
	const policy = "chain inet t input { policy %s; }"
	for _, test := range []struct{ name, flush string }{{"alone", ""}, {"with a flush", "flush table inet t"}} {
		t.Run(test.name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				nstest.NeedProgram(n.T, "nft")
				n.Load()
				write := func(text string) {
					n.Helper()
					nstest.CommandInput(n.T, text+"\n", "nft", "-f", "-")
				}
				write(`table inet t {
					chain input {
						type filter hook input priority 0; policy accept;
						iif lo accept
						tcp dport 22 accept
						tcp dport 80 accept
					}
				}`)
				d := n.Start("--protect=kube,nft:inet:t")
				if test.flush != "" {
					write(test.flush)
				}
				write(fmt.Sprintf(policy, "drop"))
				n.Until("the headline", func() error {
					code, stdout, _ := n.Canaryd("status")
					line, _, _ := strings.Cut(stdout, "\n")
					if !strings.HasPrefix(line, "healthy, but policy of inet t input is DROP since ") || !strings.HasSuffix(line, "; canaryd leaves it so") || code != 0 {
						return fmt.Errorf("exit code %d, %q", code, line)
					}
					if strings.Contains(line, "since flush 1;") != (test.flush != "") {
						return fmt.Errorf("%q names the wrong flush", line)
					}
					return nil
				})
				for path, wants := range map[string]string{"/readyz": "ok, but policy of inet t input is DROP since ", "/": "Healthy, but policy of inet t input is DROP since ",
					"/metrics": `canaryd_policy_drops{family="inet",table="inet t"} 1`} {
					if got := n.Get(path); !strings.Contains(got, wants) {
						n.Errorf("%s lacks %q", path, wants)
					}
				}
				if got := nstest.Command(n.T, "nft", "list", "chain", "inet", "t", "input"); !strings.Contains(got, "policy drop;") || !strings.Contains(got, "tcp dport 22 accept") {
					n.Errorf("the chain is\n%s", got)
				}
				d.WantLog("The policy of a base chain has become DROP")
				write(fmt.Sprintf(policy, "accept"))
				n.Until("the headline of before", func() error {
					if _, stdout, _ := n.Canaryd("status"); !strings.HasPrefix(stdout, "healthy\n") {
						return fmt.Errorf("%s", stdout)
					}
					return nil
				})
				d.Stop()
			})
		})
	}
}
