package limits

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestManyChains: another process makes 10,000 chains with protected names. canaryd learns them
// as any others, and heals the other family meanwhile, and then their own table with all of
// them.
func TestManyChains(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Turn()
		n.Load()
		d := n.Start()
		const many = 10_000
		before := n.Published().Generation
		var text bytes.Buffer
		text.WriteString("*nat\n")
		for i := range many {
			fmt.Fprintf(&text, ":%s - [0:0]\n", attacker(i))
		}
		for i := range many {
			fmt.Fprintf(&text, "-A %s -d 10.%d.%d.%d/32 -j ACCEPT\n", attacker(i), i/65536, i/256%256, i%256)
		}
		text.WriteString("COMMIT\n")
		n.Must(write(n, text.String()))
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		learned := n.Until("the chains in the generation", func() error {
			if s := n.Published(); s.Generation.Rules != before.Rules+many {
				return fmt.Errorf("the generation has %d rules, want %d", s.Generation.Rules, before.Rules+many)
			}
			return nodetest.Ready()
		})
		n.Logf("learned after %s; ipv4 nat was back %s after its flush", learned.Round(time.Millisecond), repaired(n, rules.IPv4, rules.Nat).Round(time.Millisecond))
		n.Until("the attacker's rules", func() error {
			if got := strings.Count(saved(n, rules.Nat), "\n-A "+attack); got != many {
				return fmt.Errorf("%d stand, want %d", got, many)
			}
			return nodetest.Ready()
		})
		within(n, d, "with 10,000 chains")
		d.Stop()
	})
}

// TestManyRules: another process writes 200,000 rules to chains with protected names. canaryd
// stays within the manifest's memory, and heals the other family and another table of IPv4,
// also after a restart.
func TestManyRules(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Turn()
		n.Load()
		d := n.Start()
		const many = 200_000
		chains := 1
		if onNFT(n) {
			// The kernel needs seconds to list one chain of so many rules. For each 32 KiB it
			// searches for its place from the chain's first rule.
			chains = 20
		}
		var text bytes.Buffer
		text.WriteString("*nat\n")
		for i := range chains {
			fmt.Fprintf(&text, ":%s - [0:0]\n", attacker(i))
		}
		for i := range many {
			fmt.Fprintf(&text, "-A %s -d 10.%d.%d.%d/32 -j ACCEPT\n", attacker(i%chains), i/65536, i/256%256, i%256)
		}
		text.WriteString("COMMIT\n")
		n.Must(write(n, text.String()))
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		n.Logf("ipv4 filter was back %s after its flush", repaired(n, rules.IPv4, rules.Filter).Round(time.Millisecond))
		within(n, d, "with 200,000 rules")
		wantFlushesOf(n, "ipv6 nat", "ipv4 filter")
		d.Stop()

		d = n.Launch()
		n.Logf("after a restart, ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		n.Logf("after a restart, ipv4 filter was back %s after its flush", repaired(n, rules.IPv4, rules.Filter).Round(time.Millisecond))
		within(n, d, "after a restart with 200,000 rules")
		wantFlushesOf(n, "ipv6 nat", "ipv4 filter")
		d.Stop()
	})
}

// wantFlushesOf wants no record of a loss in other tables: rules that are too many to be kept are
// not lost.
func wantFlushesOf(n *nodetest.Node, tables ...string) {
	n.Helper()
	for _, f := range status(n).Flushes {
		for _, t := range f.Lost.Tables {
			if name := t.Family.String() + " " + t.Table; !slices.Contains(tables, name) {
				n.Errorf("a flush that was none: %s %s: %+v", name, t.Kind, f)
			}
		}
	}
}
