package owners

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
// second. A CNI plugin opens a host port right before a flush of any kind, and
// closes the one before. After the flush the one must be open, and the other closed.
func TestTheLastMomentBeforeAFlush(t *testing.T) {
	tries := testkit.Size(1, 3)
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.Start("--settle=200ms")
		busy, portmap := startBusyOwner(n), asPortmap(n)
		opened, closed := 20000, 0
		for _, s := range scenario.All() {
			if !s.On(iptables.NFT) {
				continue
			}
			busy.meanwhile(func() { n.Prepare(s) }) // marks are renewed while owners rest
			saved := strings.Contains(s.Command, "restore")
			lost, shut, back := 0, 0, 0
			for range tries {
				opened, closed = opened+1, opened
				before := flushes(n)
				busy.meanwhile(func() {
					n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, hostPort(opened)))
					if closed > 20000 && !saved { // else the file has it
						closePort(n, portmap, closed)
					}
					n.Must(s.Do(n.Context(), n.Programs))
				})
				n.Until("the flush to be healed", func() error {
					if s, now := n.Looked(), flushes(n); now <= before || !s.Healthy {
						return fmt.Errorf("%.0f flushes after %.0f, healthy: %t", now, before, s.Healthy)
					}
					return nodetest.Ready()
				})
				if !standsOnce(n, opened) {
					lost++
					n.Logf("host port %d after %s: %q", opened, s.Command, portLines(n, opened))
				}
				switch lines := portLines(n, closed); {
				case closed == 20000 || saved:
				case strings.Contains(strings.Join(lines, "\n"), fmt.Sprint(closed)):
					back++
					n.Logf("host port %d is open again after %s: %q", closed, s.Command, lines)
				default:
					shut++
				}
			}
			if n.Logf("%s: %d of %d host ports came back, %d of %d stayed closed", s.Name, tries-lost, tries, shut, shut+back); lost+back > 0 {
				n.Errorf("after %s %d host ports of %d are not back once, and %d are open again", s.Command, lost, tries, back)
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

// hostPortChain returns the name of a host port's chain, as portmap gives it.
func hostPortChain(port int) string { return fmt.Sprintf("CNI-DN-%021x", port) }

func hostPort(port int) string {
	chain := hostPortChain(port)
	return fmt.Sprintf("*nat\n:%s - [0:0]\n-A %[1]s -p tcp --dport %d -j RETURN\n-A CNI-HOSTPORT-DNAT -p tcp --dport %[2]d -j %[1]s\nCOMMIT\n", chain, port)
}

// portLines returns a host port's rules, and the rules of the chain that leads to
// it.
func portLines(n *nodetest.Node, port int) []string {
	n.Helper()
	chains := []string{"CNI-HOSTPORT-DNAT", hostPortChain(port)}
	return n.Lines(func(_ rules.TableName, name string) bool { return slices.Contains(chains, name) }, func(rules.Rule) bool { return false })
}

// standsOnce reports whether both rules of a host port exist, once each.
func standsOnce(n *nodetest.Node, port int) bool {
	n.Helper()
	found := 0
	nat := n.Save()[rules.IPv4][rules.Nat]
	for _, chain := range []string{"CNI-HOSTPORT-DNAT", hostPortChain(port)} {
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

// closePort removes a host port's rules as portmap does. The kernel gives the name of the program
// file, portmap, with the notification. For a child of portmap canaryd has to read the parent,
// which on a busy machine may be too late.
func closePort(n *nodetest.Node, portmap string, port int) {
	n.Helper()
	cmd := exec.CommandContext(n.Context(), portmap, "-w", "60", "--noflush")
	cmd.Args[0] = program(n, rules.IPv4, "-restore")
	cmd.Stdin = strings.NewReader(fmt.Sprintf("*nat\n-D CNI-HOSTPORT-DNAT -p tcp --dport %d -j %s\n-F %[2]s\n-X %[2]s\nCOMMIT\n", port, hostPortChain(port)))
	if out, err := cmd.CombinedOutput(); err != nil {
		n.Fatalf("closing host port %d: %v: %s", port, err, out)
	}
}

// asPortmap returns iptables-restore in a file called portmap.
func asPortmap(n *nodetest.Node) string {
	n.Helper()
	restore, err := exec.LookPath(program(n, rules.IPv4, "-restore"))
	n.Must(err)
	text, err := os.ReadFile(restore)
	n.Must(err)
	path := filepath.Join(n.TempDir(), "portmap")
	n.Must(os.WriteFile(path, text, 0o755))
	return path
}
