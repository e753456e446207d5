package alerts

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// ceiling is the greatest number of series of a node while nothing is lost, canaryd's own and
// the runtime's. A fleet of 5,000 nodes then has 750,000.
const ceiling = 150

// atRest waits until canaryd guards the whole node, and counts the series.
func atRest(n *nodetest.Node) {
	n.Helper()
	n.Until("no copy to be in the making", func() error {
		if now := n.Metrics(); nodetest.Sum(now, "", "standby{", `"building"`)+nodetest.Sum(now, "", "standby{", `"behind"`) > 0 || now["healthy{}"] != 1 {
			return errors.New(n.Get("/metrics"))
		}
		return nil
	})
	n.Polled(2)
	var lines []string
	for line := range strings.Lines(n.Get("/metrics")) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	if len(lines) <= ceiling {
		n.Logf("%d series", len(lines))
		return
	}
	n.Errorf("%d series at rest, want at most %d: %s", len(lines), ceiling, counts(lines))
}

// counts returns the number of series of each metric, the largest first.
func counts(lines []string) string {
	of := map[string]int{}
	for _, line := range lines {
		of[line[:strings.IndexAny(line, "{ ")]]++
	}
	var text []string
	for _, name := range slices.SortedFunc(maps.Keys(of), func(a, b string) int { return of[b] - of[a] }) {
		text = append(text, fmt.Sprintf("%s %d", name, of[name]))
	}
	return strings.Join(text, ", ")
}

// TestSeriesAtRest: a node with kube-proxy's rules has few series while nothing happens, on
// either backend.
func TestSeriesAtRest(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--standby=on")
		atRest(n)
		d.Stop()
	})
}

// TestSeriesOfNativeTablesAtRest: so does a node with kube-proxy's native tables of both
// families next to iptables' rules.
func TestSeriesOfNativeTablesAtRest(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		n.LoadNative(100)
		nstest.CommandInput(n.T, "table ip6 kube-proxy { chain nat-prerouting { type nat hook prerouting priority -100; tcp dport 1 redirect to :2; }; }", "nft", "-f", "-")
		d := n.Start("--standby=on", "--protect=kube,cni,nft:ip:kube-proxy,nft:ip6:kube-proxy")
		atRest(n)
		d.Stop()
	})
}
