package e2e

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestPartsFlushedUnheard: a part of a native table is flushed while canaryd is down, or while its
// socket is full. What kube-proxy never leaves empty is back after it. Of a table that a word
// names canaryd does not know who emptied the chain: the node is not ready until an operator
// decides.
func TestPartsFlushedUnheard(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		nstest.CommandInput(n.T, ownFirewall, "nft", "-f", "-")
		const guard = "--protect=kube,nft:inet:fw"
		p := n.Start(guard)
		want, firewall := listed(n), nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "fw")
		stored := func() error {
			if stdout, _ := n.Want(0, "status"); strings.Count(stdout, "; the present one") != 2 {
				return fmt.Errorf("not all is stored:\n%s", stdout)
			}
			return nil
		}
		n.Until("the generations to be on disk", stored)
		for _, flush := range []string{"map ip kube-proxy service-ips", "chain ip kube-proxy services", "chain ip kube-proxy nat-prerouting"} {
			p.Stop()
			nstest.Command(n.T, "nft", append([]string{"flush"}, strings.Fields(flush)...)...)
			p = n.Start(guard)
			wantNative(n, want, nativeRecords(n))
			if f := n.WholeStatus().Flushes[0]; f.Kind != "emptied" || f.Outcome != "proved" {
				n.Errorf("after flush %s while canaryd was down the newest record is %+v", flush, f)
			}
		}

		p.Suspend()
		noise(n)
		nstest.Command(n.T, "nft", "flush", "chain", "ip", "kube-proxy", "nat-prerouting")
		noise(n)
		p.Signal(unix.SIGCONT)
		n.Healed(2)
		if got := listed(n); got != want {
			n.Errorf("after a flush that was not heard the table has %d bytes of nft's text, want %d", len(got), len(want))
		}

		p.Stop()
		nstest.Command(n.T, "nft", "flush", "chain", "inet", "fw", "input")
		p = n.Launch(guard)
		waits := func() error {
			if code, stdout, _ := n.Canaryd("status"); code != 1 || !strings.Contains(stdout, "table inet fw is emptied") || !strings.Contains(stdout, "canaryd dismiss accepts the loss") {
				return fmt.Errorf("status ends with %d and prints\n%s", code, stdout)
			}
			return nil
		}
		n.Until("the loss to wait for a decision", waits)
		p.WantLog("is not put back unasked", "inet fw")
		p.Kill() // it waits over restarts
		n.Launch(guard)
		n.Until("the loss to wait for a decision", waits)
		n.Want(0, "restore")
		n.Until("the table that was asked for", func() error {
			if got := nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "fw"); got != firewall {
				return fmt.Errorf("the table is\n%s\nwant\n%s", got, firewall)
			}
			return nodetest.Ready()
		})
	})
}

// noise has another process commit more than a socket holds.
func noise(n *nodetest.Node) {
	n.Helper()
	var text strings.Builder
	text.WriteString("table inet noise {\n")
	for i := range 15000 {
		fmt.Fprintf(&text, "chain c%d { }\n", i)
	}
	text.WriteString("}\n")
	for range 4 {
		nstest.CommandInput(n.T, text.String()+"delete table inet noise\n", "nft", "-f", "-")
	}
}
