package limits

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	commitsASecond = 500
	stormLasts     = 10 * time.Second
	// stormShare is the greatest share of a core for canaryd and its children in a storm.
	stormShare = 0.5
)

// TestStormOfCommits: another process creates, changes and deletes protected chains 500 times a
// second. Meanwhile the test flushes a table of the same family and a table of the other
// family. Both return. canaryd's share of a core, its memory and its log stay within bounds,
// and after the storm it knows the present rules.
func TestStormOfCommits(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Turn()
		n.Load()
		d := n.Start()
		logged, used, began := lines(d), d.CPU(), time.Now()
		done := make(chan struct{})
		w := newWriter(n)
		commits, begun := 0, make(chan struct{})
		begins := sync.OnceFunc(func() { close(begun) })
		go func() {
			defer close(done)
			for passed := range testkit.During(n.T, stormLasts, "the storm") {
				if commits == commitsASecond {
					begins()
				}
				due := time.Duration(commits) * time.Second / commitsASecond
				testkit.Pass(n.T, due-passed, "the distance of two commits")
				w.commit(stormCommit(commits))
				commits++
			}
			begins() // a busy machine commits less often
			w.end()
		}()
		testkit.Receive(n.T, begun, "a second's commits of the storm")
		for _, f := range rules.Families() {
			n.Logf("%s filter was back %s after its flush", f, repaired(n, f, rules.Filter).Round(time.Millisecond))
		}
		n.Logf("ipv6 nat was back %s after its flush", repaired(n, rules.IPv6, rules.Nat).Round(time.Millisecond))
		<-done
		lasted := time.Since(began)
		share := (d.CPU() - used).Seconds() / lasted.Seconds()
		n.Logf("%.0f commits a second for %s: canaryd used %.0f %% of a core and logged %d lines", float64(commits)/lasted.Seconds(),
			lasted.Round(time.Second), 100*share, lines(d)-logged)
		if share > stormShare {
			n.Errorf("canaryd used %.0f %% of a core, want at most %.0f", 100*share, 100*stormShare)
		}
		if more := lines(d) - logged; more > 60 {
			n.Errorf("canaryd logged %d lines in the storm, want at most 60:\n%s", more, d.Log())
		}
		within(n, d, "in the storm")
		n.Until("health after the storm", nodetest.Ready)
		repaired(n, rules.IPv4, rules.Nat)
		d.Stop()
	})
}

// stormCommit returns one commit. Of each three, the first makes a chain with a rule, the
// second changes the rule, and the third deletes the chain. There are 50 such chains.
func stormCommit(i int) string {
	chain := attacker(i / 3 % 50)
	switch i % 3 {
	case 0:
		return fmt.Sprintf("*nat\n:%s - [0:0]\n-A %s -d 10.9.%d.%d/32 -j ACCEPT\nCOMMIT\n", chain, chain, i/250%250, i%250)
	case 1:
		return fmt.Sprintf("*nat\n-R %s 1 -d 10.8.%d.%d/32 -j ACCEPT\nCOMMIT\n", chain, i/250%250, i%250)
	default:
		return fmt.Sprintf("*nat\n-F %s\n-X %s\nCOMMIT\n", chain, chain)
	}
}
