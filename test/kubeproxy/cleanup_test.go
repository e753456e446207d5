package kubeproxy

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// times is the variable that says how often TestCleanupOnABusyNode does what it does.
const times = "CANARYD_KUBEPROXY_TIMES"

// TestCleanupOnABusyNode: where all cores are busy, nft has mostly ended before /proc can be read.
// What kube-proxy --cleanup removes is its owner's doing all the same, and makes no record. What a
// script removes by the same commands waits for a decision. The test runs before those that run at
// the same time, which need a core.
func TestCleanupOnABusyNode(t *testing.T) {
	nstest.NeedRoot(t)
	nstest.NeedProgram(t, "ip", "nft")
	if os.Getenv(program) == "" {
		t.Skip("make kubeproxy builds and names a kube-proxy")
	}
	rounds, err := strconv.Atoi(os.Getenv(times))
	if err != nil {
		rounds = 2
	}
	nodetest.In(t, iptables.NFT, func(n *nodetest.Node) {
		all := newSpaces(n.T, iptables.NFT, "node", "calm-iptables", "calm-nftables")
		a := newAPI()
		l := &life{Node: n, space: all[0], town: newTown(a, rand.New(rand.NewPCG(seed(n.T), 5)), 12),
			calm: map[string]*space{inIPTables: all[1], inNFTables: all[2]}, hand: &hand{}}
		a.serve(n.T, all...)
		startProxy(n.T, all[1], inIPTables)
		startProxy(n.T, all[2], inNFTables)
		guardNode(n)
		ctx, stop := context.WithCancel(n.Context())
		defer stop()
		for range runtime.NumCPU() {
			busy := exec.CommandContext(ctx, "sh", "-c", "while :; do :; done")
			n.Must(busy.Start())
			defer func() { stop(); _ = busy.Wait() }()
		}
		records := func(what string, want int) {
			n.Helper()
			s := n.Status()
			if got := s.Count() - l.seen; got != want { // many in a row fold
				n.Errorf("%s made %d records, want %d: %+v", what, got, want, s.Flushes)
			}
			l.seen = s.Count()
		}
		guarded := func(is bool) {
			n.Helper()
			within(n.T, equalIn, "kube-proxy's tables to be guarded", func() error {
				return l.guards(is)
			})
		}
		for range rounds {
			l.proxy = startProxy(n.T, all[0], inNFTables)
			l.equal(inNFTables)
			guarded(true)
			l.proxy.end(syscall.SIGTERM)
			cleanUp(n.T, all[0])
			guarded(false)
			time.Sleep(3 * time.Second) // no state says that a record does not come
			records("kube-proxy --cleanup", 0)
		}
		l.proxy = startProxy(n.T, all[0], inNFTables)
		for range rounds {
			l.equal(inNFTables)
			guarded(true)
			for _, family := range []string{"ip", "ip6"} {
				_, err := all[0].run(n.Context(), "", "sh", "-c", "nft delete table "+family+" kube-proxy")
				n.Must(err)
			}
			within(n.T, equalIn, "the loss", func() error { return l.awaits(2) })
			if out, _, _ := n.Canaryd("restore"); out != 0 {
				n.Errorf("restore: exit code %d", out)
			}
			within(n.T, equalIn, "the tables to be back", func() error { return l.awaits(0) })
			records("nft delete table by a script", 2)
		}
	})
}

// tables returns how many of kube-proxy's native tables canaryd guards, and how many wait.
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

// guards returns an error unless canaryd guards both of kube-proxy's tables, or none.
func (l *life) guards(both bool) error {
	if guarded, awaiting := l.tables(); awaiting > 0 || (guarded == 2) != both || (guarded == 0) == both {
		return fmt.Errorf("%d are guarded, %d wait for a decision", guarded, awaiting)
	}
	return nil
}

// awaits returns an error unless so many of kube-proxy's tables wait for a decision.
func (l *life) awaits(want int) error {
	if _, awaiting := l.tables(); awaiting != want {
		return fmt.Errorf("%d wait for a decision, want %d", awaiting, want)
	}
	return nil
}
