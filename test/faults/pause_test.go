package faults

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestPause: a pause lasts from its command to its end, over a stop and a kill. internal/daemon
// tests its time, and each kind of loss.
func TestPause(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		d := n.Start("--poll-interval=100ms")
		stdout, _ := n.Want(0, "pause", "--for=1h")
		if !strings.HasPrefix(stdout, "replays are paused until 20") {
			n.Errorf("pause prints %q", stdout)
		}
		n.Flush()
		lost := n.Protected()
		n.Until("the status to have the whole flush, which waits", func() error {
			code, stdout, _ := n.Canaryd("status")
			if code != 1 || !strings.Contains(stdout, "ipv6 filter is emptied; replays are paused until 20") || !strings.Contains(stdout, "waiting: paused") {
				return fmt.Errorf("exit code %d:\n%s", code, stdout)
			}
			return nil
		})
		n.Want(1, "check")
		if stdout, _ = n.Want(0, "pause", "--for=2h"); !strings.Contains(stdout, "in place of") {
			n.Errorf("a second pause prints %q", stdout)
		}

		d.Stop()
		paused := func() error {
			if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "paused") {
				return fmt.Errorf("/readyz: %v", err)
			}
			return nil
		}
		next := n.Launch()
		n.Until("canaryd to go on with the pause", paused)
		next.WantLog("the pause of the last run continues")
		next.Kill()
		next = n.Launch()
		n.Until("canaryd after a kill in a pause", paused)
		n.Same("protected rules after a kill in a pause", lost, n.Protected())

		if stdout, _ := n.Want(0, "resume"); stdout != "replays are no longer paused\n" {
			n.Errorf("resume prints %q", stdout)
		}
		n.Until("the rules to be back", nodetest.Ready)
		n.Same("protected rules after a resume", protected, n.Protected())
		if stdout, _ := n.Want(0, "resume"); stdout != "there was no pause\n" {
			n.Errorf("resume without a pause prints %q", stdout)
		}
		next.Stop()
	})
}
