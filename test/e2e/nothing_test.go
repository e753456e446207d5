package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestNothingProtected: on a node whose Docker writes nftables tables of its own, canaryd is
// ready, but says that it protects nothing and what it found. A guarded table without a rule is
// nothing, too.
func TestNothingProtected(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft")
		nstest.Command(n.T, "nft", "add table ip docker-bridges; add table ip6 docker-bridges; add table ip kube-proxy")
		d := n.Launch()
		const found = "native nftables tables, which canaryd does not guard (ip docker-bridges, ip6 docker-bridges)"
		n.Until("the tables to be named", func() error {
			text, err := nodetest.Fetch("/readyz")
			if err == nil && !strings.Contains(text, found) {
				err = errors.New(text)
			}
			return err
		})
		if stdout, _ := n.Want(1, "status"); !strings.HasPrefix(stdout, "NOT healthy: nothing is protected") || !strings.Contains(stdout, found) {
			n.Errorf("status says %s", stdout)
		}
		if stdout, _ := n.Want(0, "check", "-o", "line"); !strings.HasPrefix(stdout, "nothing protected: ") {
			n.Errorf("check says %s", stdout)
		}
		if text := n.Get("/"); !strings.Contains(text, "Nothing protected") || !strings.Contains(text, "ip6 docker-bridges") {
			n.Error("the page does not say it")
		}
		if text := n.Get("/metrics"); !strings.Contains(text, "canaryd_nothing_protected 1") {
			n.Error("metrics do not have it")
		}
		n.Load()
		n.Until("the rules that came to be guarded", func() error {
			if !n.Status().Healthy {
				return errors.New("not healthy")
			}
			return nil
		})
		d.Stop()
	})
}
