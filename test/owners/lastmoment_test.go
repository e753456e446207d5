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

// TestTheLastMomentBeforeAFlush: on nft an owner changes a chain up to 50 times a second, and a CNI
// plugin opens a host port right before a flush of any kind. The port is open again after it.
func TestTheLastMomentBeforeAFlush(t *testing.T) {
	tries := testkit.Size(1, 20)
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Start("--settle=200ms")
		busy := startBusyOwner(n)
		port := 20000
		for _, s := range scenario.All() {
			if !s.On(iptables.NFT) {
				continue
			}
			if s.Prepare != nil {
				marks := n.Marks()
				busy.meanwhile(func() { // marks are renewed while owners rest
					n.Must(s.Prepare(n.Context(), n.Programs))
					n.Until("other marks than those of a file that was saved before", func() error {
						if slices.Equal(marks, n.Marks()) {
							return errors.New("they are the same")
						}
						return nil
					})
				})
			}
			lost := 0
			for range tries {
				port++
				before := n.Status().Count()
				busy.meanwhile(func() {
					n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, hostPort(port)))
					n.Must(s.Do(n.Context(), n.Programs))
				})
				n.Until("the flush to be healed", func() error {
					if s := n.Looked(); s.Count() <= before || !s.Healthy {
						return fmt.Errorf("%d flushes after %d, healthy: %t", s.Count(), before, s.Healthy)
					}
					return nodetest.Ready()
				})
				if !standsOnce(n, port) {
					lost++
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

func hostPort(port int) string {
	chain := fmt.Sprintf("CNI-DN-%d", port)
	return fmt.Sprintf("*nat\n:%s - [0:0]\n-A %[1]s -p tcp --dport %d -j RETURN\n-A CNI-HOSTPORT-DNAT -p tcp --dport %[2]d -j %[1]s\nCOMMIT\n", chain, port)
}

// standsOnce reports whether both rules of a host port stand, once each.
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

// A busyOwner writes the same chain again and again, as kube-proxy writes an endpoint's.
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
				text := fmt.Sprintf("*nat\n:KUBE-SEP-BUSY - [0:0]\n-A KUBE-SEP-BUSY -s 10.200.%d.%d/32 -j RETURN\nCOMMIT\n", b.commits/250%250, b.commits%250)
				if n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text) == nil { // at the test's end it fails
					b.commits++
				}
			})
		}
	}()
	return b
}

// meanwhile does something while the owner writes nothing: a chain with a rule cannot be deleted.
func (b *busyOwner) meanwhile(do func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	do()
}

func (b *busyOwner) end() {
	close(b.stop)
	<-b.ended
}
