package owners

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAChainThatAPersonFlushes: a person flushes one chain after the other. A
// chain that its owner never leaves empty is back at once. A chain that its owner
// flushes before it fills or deletes it is back after the grace. A chain that its
// owner may have emptied stays empty, and status says so.
func TestAChainThatAPersonFlushes(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(scenario.Load(n.Context(), n.Programs, rules.Families()...))
		n.Protects = selectorOf(n, "kube", "cni", "docker", "podman", "libvirt", "tailscale").Protects
		n.Must(scenario.LoadOwners(n.Context(), n.Programs, rules.Families()...))
		run(n, rules.IPv4, rules.Filter, "-A", "DOCKER-USER", "-s", "192.0.2.0/24", "-j", "DROP")
		for _, protocol := range []string{"udp", "tcp"} {
			run(n, rules.IPv4, rules.Raw, "-A", "PREROUTING", "-d", "169.254.20.10/32", "-p", protocol, "-j", "NOTRACK")
			run(n, rules.IPv4, rules.Security, "-A", "OUTPUT", "-d", "192.0.2.7/32", "-p", protocol, "-j", "ACCEPT")
		}
		const grace = 2 * time.Second
		p := n.Launch("--protect=kube,cni,docker,podman,libvirt,tailscale", "--jump-grace="+grace.String())
		n.Until("canaryd to be ready", nodetest.Ready)
		testkit.Pass(n.T, time.Second, "that marks of a new generation are renewed")
		before := n.Protected()
		nat := n.Save()[rules.IPv4][rules.Nat]
		named := func(prefix string) string {
			i := slices.IndexFunc(nat.Chains, func(c rules.Chain) bool { return strings.HasPrefix(c.Name, prefix) && len(c.Rules) > 0 })
			if i < 0 {
				n.Fatalf("no chain %s", prefix)
			}
			return nat.Chains[i].Name
		}
		records := 0
		for _, lost := range []struct {
			table rules.TableName
			chain string
			after time.Duration
		}{
			{rules.Nat, named("KUBE-SEP-"), 0},
			{rules.Nat, named("KUBE-SVC-"), 0},
			{rules.Nat, "CNI-HOSTPORT-MASQ", 0},
			{rules.Nat, "CNI-HOSTPORT-SETMARK", 0},
			{rules.Filter, "DOCKER-FORWARD", grace},
			{rules.Nat, named("CNI-DN-"), grace},
		} {
			flushed := time.Now()
			run(n, rules.IPv4, lost.table, "-F", lost.chain)
			records++
			record := n.Healed(records)
			n.Same(lost.chain+" is back", before, n.Protected())
			absent := time.Since(flushed)
			if absent < lost.after {
				n.Errorf("%s was put back after %s, within the grace of its owner", lost.chain, absent)
			}
			n.Logf("%s: back after %s at most, the record says %.0f ms", lost.chain, absent.Round(time.Millisecond), 1000*record.AbsentSeconds)
		}

		for i, accepted := range []struct {
			table rules.TableName
			chain string // empty: all chains
			want  string
		}{
			{rules.Filter, "DOCKER-USER", "accepted as its owner's doing: ipv4 filter DOCKER-USER lost one rule, 0 left"},
			{rules.Nat, "DOCKER", "accepted as its owner's doing: ipv4 nat DOCKER lost one rule, 0 left"},
			{rules.Filter, "LIBVIRT_FWI", "accepted as its owner's doing: ipv4 filter LIBVIRT_FWI lost 2 rules, 0 left"},
			{rules.Raw, "", "not guarded, and not put back: ipv4 raw lost 2 rules, 0 left"},
			{rules.Security, "", "not guarded, and not put back: ipv4 security lost 2 rules, 0 left"},
		} {
			args := []string{"-F"}
			if accepted.chain != "" {
				args = append(args, accepted.chain)
			}
			run(n, rules.IPv4, accepted.table, args...)
			left, want := n.Protected(), accepted.want
			var line, published string
			n.Until(want, func() error {
				now := n.Get("/api/v1/status")
				if now == published {
					return errors.New("nothing has changed")
				}
				published = now
				text, _ := n.Want(0, "status")
				for l := range strings.Lines(text) {
					if strings.HasPrefix(l, want) {
						line = l
						return nil
					}
				}
				return fmt.Errorf("status says\n%s", text)
			})
			if n.Programs.With == iptables.NFT && !strings.Contains(line, "iptables") {
				n.Errorf("it does not name the process: %s", line)
			}
			n.Same("an accepted loss stays so", left, n.Protected())
			if got := len(n.Status().Flushes); got != records {
				n.Errorf("%d flush records after %d removals, want %d", got, i+1, records)
			}
		}
		n.Want(0, "check")
		p.Stop()
	})
}
