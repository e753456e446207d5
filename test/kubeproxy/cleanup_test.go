package kubeproxy

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// times is the variable with the number of TestCleanupOnABusyNode's rounds.
const times = "CANARYD_KUBEPROXY_TIMES"

// TestCleanupOnABusyNode: all cores are busy, so nft has mostly ended before canaryd can read
// /proc. kube-proxy --cleanup, or a start in the other mode, still counts as the owner's doing,
// without a record. A script's removal by the same commands waits for a decision. The test runs
// before the parallel ones, which need a core.
func TestCleanupOnABusyNode(t *testing.T) {
	needProxy(t)
	rounds, err := strconv.Atoi(os.Getenv(times))
	if err != nil {
		rounds = 2
	}
	nodetest.In(t, iptables.NFT, func(n *nodetest.Node) {
		all := newSpaces(n.T, iptables.NFT, "node", "calm-iptables", "calm-nftables")
		a := newAPI()
		l := &life{Node: n, space: all[0], town: newTown(a, rand.New(rand.NewPCG(seed(n.T), 5)), 12),
			hand: &hand{}}
		a.serve(n.T, all...)
		l.calm = map[string]*proxy{inIPTables: startProxy(n.T, all[1], inIPTables), inNFTables: startProxy(n.T, all[2], inNFTables)}
		guardNode(n)
		ctx, stop := context.WithCancel(n.Context())
		defer stop()
		for range runtime.NumCPU() {
			busy := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
			n.Must(busy.Start())
			defer func() { stop(); _ = busy.Wait() }()
		}
		made := map[string]int{}
		records := func(what string, want int) {
			n.Helper()
			s := n.Status()
			if got := s.Count() - l.seen; got != want { // many records in a row fold
				n.Errorf("%s made %d records, want %d: %+v", what, got, want, s.Flushes)
			} else {
				made[what]++
			}
			l.seen = s.Count()
		}
		// A later record counts for the next step.
		start := func(mode string) {
			n.Helper()
			l.proxy = startProxy(n.T, all[0], mode)
			l.equal(mode)
			testkit.Until(n.T, "canaryd to guard kube-proxy's rules of "+mode+" mode, and no others", func() error { return l.guards(mode) })
		}
		for range rounds {
			start(inNFTables)
			l.proxy.end(syscall.SIGTERM)
			cleanUp(n.T, all[0])
			testkit.Until(n.T, "canaryd to guard nothing", func() error { return l.guards("no") })
			records("kube-proxy --cleanup", 0)
		}
		start(inNFTables)
		for range rounds {
			for _, mode := range []string{inIPTables, inNFTables} {
				l.proxy.end(syscall.SIGTERM)
				start(mode)
				records("a switch to "+mode+" mode", 0)
			}
		}
		for range rounds {
			testkit.Until(n.T, "kube-proxy's tables to be guarded", func() error { return l.guards(inNFTables) })
			for _, family := range []string{"ip", "ip6"} {
				_, err := all[0].run(n.Context(), "", "sh", "-c", "nft delete table "+family+" kube-proxy")
				n.Must(err)
			}
			testkit.Until(n.T, "the loss", func() error { return l.awaits(2) })
			if out, _, _ := n.Canaryd("restore"); out != 0 {
				n.Errorf("restore: exit code %d", out)
			}
			testkit.Until(n.T, "the tables to be back", func() error { return l.awaits(0) })
			records("nft delete table by a script", 2)
		}
		lines := []string{"kube-proxy on a busy node: as wanted of " + strconv.Itoa(rounds) + " each"}
		for _, what := range slices.Sorted(maps.Keys(made)) {
			lines = append(lines, fmt.Sprintf("  %-30s %3d", what, made[what]))
		}
		report(n.T, lines...)
	})
}

// tables returns the numbers of kube-proxy's native tables that canaryd guards, and that wait.
func (l *life) tables() (guarded, awaiting int) {
	for _, t := range l.WholeStatus().Native {
		if t.Table == "ip kube-proxy" || t.Table == "ip6 kube-proxy" {
			guarded++
			if t.Verdict == "deleted_by_owner_or_unknown" {
				awaiting++
			}
		}
	}
	return guarded, awaiting
}

// leftRules is more than the rules of KUBE-FIREWALL with their jumps, which kube-proxy writes
// in iptables mode and never removes.
const leftRules = 20

// guards returns an error unless canaryd is healthy, has learned all changes, and guards only
// this mode. That is both native tables of kube-proxy in nftables mode, or its chains in
// iptables mode.
func (l *life) guards(mode string) error {
	s := l.WholeStatus()
	guarded, awaiting := l.tables()
	native, chains := guarded == 2, s.Generation.Rules > leftRules
	switch {
	case awaiting > 0 || guarded == 1 || native != (mode == inNFTables) || chains != (mode == inIPTables):
		return fmt.Errorf("%d native tables are guarded, %d wait for a decision; %d rules of iptables' tables are guarded", guarded, awaiting, s.Generation.Rules)
	case !s.LearningPendingSince.IsZero():
		return fmt.Errorf("learning is pending since %s", s.LearningPendingSince)
	}
	return nil
}

// awaits returns an error unless that number of kube-proxy's tables waits for a decision.
func (l *life) awaits(want int) error {
	if _, awaiting := l.tables(); awaiting != want {
		return fmt.Errorf("%d wait for a decision, want %d", awaiting, want)
	}
	return nil
}
