package owners

import (
	"errors"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ofProxy reports whether a word of iptables-save is a chain of kube-proxy's.
func ofProxy(name string) bool {
	return protect.KubeProxys(name) || name == "KUBE-PROXY-CANARY" || name == "KUBE-MARK-MASQ" || name == "KUBE-POSTROUTING"
}

// cleansUp is kube-proxy --cleanup in one family, with the kernel's own iptables: jumps
// first, then nat, filter, and its canary in mangle last.
func cleansUp(n *nodetest.Node, f rules.Family) {
	n.Helper()
	saved := n.Save()[f]
	for _, t := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		var jumps, declare, remove []string
		for _, c := range saved[t].Chains {
			if ofProxy(c.Name) {
				declare, remove = append(declare, ":"+c.Name+" - [0:0]"), append(remove, "-X "+c.Name)
			}
			for _, r := range c.Rules {
				if rules.Builtin(t, c.Name) && ofProxy(r.Target) {
					jumps = append(jumps, "-D "+c.Name+" "+r.Spec)
				}
			}
		}
		text := "*" + string(t) + "\n" + strings.Join(append(append(declare, jumps...), remove...), "\n") + "\nCOMMIT\n"
		n.Must(n.Programs.RestoreNoflush(n.Context(), f, text))
	}
}

// TestAKubeProxyThatLeft: once canaryd has read that kube-proxy took its chains and its
// canary away, a flush brings back everything but these, however soon it comes.
func TestAKubeProxyThatLeft(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		p := n.Start()
		for _, f := range n.Families {
			cleansUp(n, f)
		}
		n.Until("canaryd to read that kube-proxy has left", func() error {
			if strings.Count(p.Log(), "kube-proxy has removed its chains and its canary") < len(n.Families) {
				return errors.New("the log does not say so of each family")
			}
			return nil
		})
		protected := n.Protected()
		flush(n, true)
		n.Healed(1)
		for _, f := range n.Families {
			for t, set := range n.Save()[f] {
				for _, c := range set.Chains {
					if ofProxy(c.Name) {
						n.Errorf("%s %s %s of a kube-proxy that has left is back", f, t, c.Name)
					}
				}
			}
		}
		n.Same("what others protect", protected, n.Protected())
		p.Stop()
	})
}
