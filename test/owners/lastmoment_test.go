package owners

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTheLastMomentAtSize does the same with a flush whose notifications are too
// many for the socket.
func TestTheLastMomentAtSize(t *testing.T) {
	testkit.Large(t, "5,000 services")
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Must(n.Programs.Restore(n.Context(), rules.IPv4, n.Services(5000)))
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n:CNI-HOSTPORT-DNAT - [0:0]\n-A PREROUTING -j CNI-HOSTPORT-DNAT\nCOMMIT\n"))
		n.Start("--settle=200ms")
		for i, flush := range []struct {
			command string
			do      func() error
		}{
			{"iptables -t nat -F", func() error { return n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, "") }},
			{"nft flush ruleset", func() error { return n.Programs.FlushRuleset(n.Context()) }},
			{"iptables-restore of an empty table", func() error { return n.Programs.Restore(n.Context(), rules.IPv4, "*nat\nCOMMIT\n") }},
		} {
			port, before := 20000+i, flushes(n)
			n.Learned()
			n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, hostPort(port)))
			n.Must(flush.do())
			n.Until("the flush to be healed", func() error {
				if s := n.Looked(); flushes(n) <= before || !s.Healthy {
					return errors.New("it is not")
				}
				return nodetest.Ready()
			})
			if !standsOnce(n, port) {
				n.Errorf("after %s a host port of the last moment is not back once", flush.command)
			}
		}
	})
}

// TestTheLastMomentBeforeAFlush: on nft an owner changes a chain up to 50 times a
// second. A CNI plugin opens a host port right before a flush of any kind. The
// port must be open again after it.
func TestTheLastMomentBeforeAFlush(t *testing.T) {
	tries := testkit.Size(1, 3)
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Start("--settle=200ms")
		busy := startBusyOwner(n)
		port := 20000
		for _, s := range scenario.All() {
			if !s.On(iptables.NFT) {
				continue
			}
			busy.meanwhile(func() { n.Prepare(s) }) // marks are renewed while owners rest
			lost := 0
			for range tries {
				port++
				before := flushes(n)
				busy.meanwhile(func() {
					n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, hostPort(port)))
					n.Must(s.Do(n.Context(), n.Programs))
				})
				n.Until("the flush to be healed", func() error {
					if s, now := n.Looked(), flushes(n); now <= before || !s.Healthy {
						return fmt.Errorf("%.0f flushes after %.0f, healthy: %t", now, before, s.Healthy)
					}
					return nodetest.Ready()
				})
				if !standsOnce(n, port) {
					lost++
					n.Logf("host port %d after %s: %q", port, s.Command, portLines(n, port))
				}
			}
			if n.Logf("%s: %d of %d host ports came back", s.Name, tries-lost, tries); lost > 0 {
				n.Errorf("after %s %d host ports of %d are not back once", s.Command, lost, tries)
			}
		}
		if busy.end(); busy.commits == 0 {
			n.Error("the busy owner wrote nothing")
		}
	})
}

// flushes returns the number of flushes: the status has only the last records.
func flushes(n *nodetest.Node) float64 {
	n.Helper()
	return nodetest.Sum(n.Metrics(), "flush_events_total{")
}

func hostPort(port int) string {
	chain := fmt.Sprintf("CNI-DN-%d", port)
	return fmt.Sprintf("*nat\n:%s - [0:0]\n-A %[1]s -p tcp --dport %d -j RETURN\n-A CNI-HOSTPORT-DNAT -p tcp --dport %[2]d -j %[1]s\nCOMMIT\n", chain, port)
}

// portLines returns a host port's rules, and the rules of the chain that leads to
// it.
func portLines(n *nodetest.Node, port int) []string {
	n.Helper()
	chains := []string{"CNI-HOSTPORT-DNAT", fmt.Sprintf("CNI-DN-%d", port)}
	return n.Lines(func(_ rules.TableName, name string) bool { return slices.Contains(chains, name) }, func(rules.Rule) bool { return false })
}

// standsOnce reports whether both rules of a host port exist, once each.
func standsOnce(n *nodetest.Node, port int) bool {
	n.Helper()
	found := 0
	nat := n.Save()[rules.IPv4][rules.Nat]
	for _, chain := range []string{"CNI-HOSTPORT-DNAT", fmt.Sprintf("CNI-DN-%d", port)} {
		c := nat.Chain(chain)
		if c == nil {
			return false
		}
		for _, r := range c.Rules {
			if strings.Contains(r.Spec, fmt.Sprintf("--dport %d ", port)) {
				found++
			}
		}
	}
	return found == 2
}

// A busyOwner writes the same chain again and again, as kube-proxy does with an
// endpoint's chain.
type busyOwner struct {
	mu      sync.Mutex
	stop    chan struct{}
	ended   chan struct{}
	commits int
}

func startBusyOwner(n *nodetest.Node) *busyOwner {
	b := &busyOwner{stop: make(chan struct{}), ended: make(chan struct{})}
	tick := time.NewTicker(20 * time.Millisecond)
	go func() {
		defer close(b.ended)
		defer tick.Stop()
		for {
			select {
			case <-b.stop:
				return
			case <-tick.C:
			}
			b.meanwhile(func() {
				text := fmt.Sprintf("*nat\n:KUBE-SEP-BUSYBUSYBUSYBUSY - [0:0]\n-A KUBE-SEP-BUSYBUSYBUSYBUSY -s 10.200.%d.%d/32 -j RETURN\nCOMMIT\n", b.commits/250%250, b.commits%250)
				if n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text) == nil { // at the test's end it fails
					b.commits++
				}
			})
		}
	}()
	return b
}

// meanwhile does something while the owner writes nothing: a chain with a rule
// cannot be deleted.
func (b *busyOwner) meanwhile(do func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	do()
}

func (b *busyOwner) end() {
	close(b.stop)
	<-b.ended
}
