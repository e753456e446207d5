package e2e

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestATakenPort: another process has canaryd's port. canaryd must still guard
// and report this, and serve there once the port is free. internal/daemon tests a
// process with the name of its lock.
func TestATakenPort(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		protected := n.Protected()
		port, err := net.Listen("tcp", tcp)
		n.Must(err)
		n.Cleanup(func() { port.Close() })
		d := n.Launch()
		healthy := func() error {
			if code, stdout, stderr := n.Canaryd("health", "ready"); code != 0 {
				return errors.New(stdout + stderr)
			}
			return nil
		}
		n.Until("canaryd to be healthy", healthy)
		n.Want(0, "health")
		d.WantLog("Metrics, health and page are not served", "address already in use", "trying again every 5s")
		n.Flush()
		n.Until("a repaired flush", func() error {
			if s := n.Looked(); len(s.Flushes) == 0 || !s.Healthy {
				return fmt.Errorf("%d flush records, healthy %t", len(s.Flushes), s.Healthy)
			}
			return nil
		})
		n.Same("protected rules", protected, n.Protected())
		if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, "metrics and page are NOT served") {
			n.Errorf("status does not say that the port is taken:\n%s", stdout)
		}
		port.Close()
		n.Until("an answer at the port", nodetest.Ready)
		n.Until("a status without the port", func() error {
			if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "NOT served") {
				return errors.New(stdout)
			}
			return nil
		})
		d.Stop()
		if code, _, stderr := n.Canaryd("health"); code != 2 || !strings.Contains(stderr, "no canaryd is running") {
			n.Errorf("health without a canaryd ends with %d: %s", code, stderr)
		}
	})
}
