package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	contract "github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// guard names kube-proxy's rules of both modes.
const guard = "--protect=kube"

const (
	slots = 48
	// calmFor is the time of changes without a flush: canaryd must record none.
	calmFor = 15 * time.Second
	// bareFor is the time in which the node without canaryd may recover.
	bareFor = 20 * time.Second
)

// stormFor returns the time of flushes for each row: CANARYD_KUBEPROXY, or 60 s.
func stormFor(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("CANARYD_KUBEPROXY")
	if text == "" {
		return time.Minute
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// seed returns the seed of a test: CANARYD_KUBEPROXY_SEED, or a random one.
func seed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("CANARYD_KUBEPROXY_SEED")
	if text == "" {
		return rand.Uint64() % 1e6
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A kind is a way in which nodes run kube-proxy.
type kind struct {
	name    string
	backend iptables.Backend
	mode    string
}

var ways = []kind{
	{"iptables mode, iptables-nft", iptables.NFT, inIPTables},
	{"iptables mode, iptables-legacy", iptables.Legacy, inIPTables},
	{"nftables mode", iptables.NFT, inNFTables},
}

// needProxy skips the test unless everything for a kube-proxy exists.
func needProxy(t *testing.T) {
	t.Helper()
	nstest.NeedRoot(t)
	if os.Getenv(program) == "" {
		nstest.Need(t, "a kube-proxy", errors.New("make kubeproxy builds and names it"))
	}
	nstest.NeedProgram(t, "ip", "nft")
}

// onKinds runs body for each kind of node.
func onKinds(t *testing.T, body func(n *nodetest.Node, k kind)) {
	t.Parallel()
	needProxy(t)
	for _, k := range ways {
		t.Run(strings.NewReplacer(",", "", " ", "-").Replace(k.name), func(t *testing.T) {
			t.Parallel()
			nodetest.In(t, k.backend, func(n *nodetest.Node) { body(n, k) })
		})
	}
}

// A storm has a node with canaryd, a node that is flushed without it, and a node that is never
// flushed.
type storm struct {
	*nodetest.Node
	kind       kind
	town       *town
	node, bare *proxy
	calm       *proxy
	canaryd    *nodetest.Process
	records    map[string]scenario.Record // by ID, because the status has only the last hundred
}

// collect adds the present flush records. It forgets records that were unanswered before.
// canaryd keeps no record of rules that their owner restores before canaryd reads them.
func (s *storm) collect() {
	maps.DeleteFunc(s.records, func(_ string, r scenario.Record) bool {
		return contract.Flush{Outcome: contract.Outcome(r.Outcome)}.Unanswered()
	})
	for _, r := range s.Status().Flushes {
		s.records[r.ID] = r
	}
}

// TestStorm: services change 5 to 20 times a second, and rules are flushed at random. In the
// end they equal those of a kube-proxy that was never flushed.
func TestStorm(t *testing.T) {
	onKinds(t, func(n *nodetest.Node, k kind) {
		number := seed(n.T)
		n.Logf("CANARYD_KUBEPROXY_SEED=%d", number)
		all := newSpaces(n.T, k.backend, "node", "bare", "calm")
		a := newAPI()
		s := &storm{Node: n, kind: k, town: newTown(a, rand.New(rand.NewPCG(number, 1)), slots), records: map[string]scenario.Record{}}
		a.serve(n.T, all...)
		s.node, s.bare = startProxy(n.T, all[0], k.mode), startProxy(n.T, all[1], k.mode)
		s.calm = startProxy(n.T, all[2], k.mode)
		s.canaryd = guardNode(n)
		h := newHand(rand.New(rand.NewPCG(number, 2)), k.mode, all[0], all[1])
		changes := s.strike(h, stormFor(n.T))
		s.judge(h, changes, number)
	})
}

// guardNode starts canaryd, and returns once it guards kube-proxy's rules.
func guardNode(n *nodetest.Node) *nodetest.Process {
	n.Helper()
	p := n.Launch(guard)
	n.Until("canaryd to be healthy", func() error {
		if !p.Running() {
			n.Fatalf("canaryd ended at once: %v\n%s", p.Err(), p.Log())
		}
		return nodetest.Ready()
	})
	return p
}

// strike changes services all the time, and flushes after a calm time. It returns the number of
// changes.
func (s *storm) strike(h *hand, long time.Duration) (changes int) {
	ctx, stop := context.WithCancel(s.Context())
	var changing sync.WaitGroup
	changing.Go(func() {
		for ctx.Err() == nil {
			s.town.change()
			changes++
			testkit.Pass(s.T, time.Duration(50+s.town.rng.IntN(150))*time.Millisecond, "the distance of two changes")
		}
	})
	testkit.Pass(s.T, calmFor, "that changes without a flush make no record")
	if records := s.Status().Flushes; len(records) > 0 {
		s.Errorf("without a flush there are %d records: %+v", len(records), records[0])
	}
	for range testkit.During(s.T, long, "the storm") {
		for _, err := range h.strike(ctx) {
			s.Logf("a flusher's program failed: %v", err)
		}
		s.collect()
		pause := time.Duration(1000+h.rng.IntN(5000)) * time.Millisecond
		if h.rng.IntN(4) == 0 {
			pause /= 10
		}
		testkit.Pass(s.T, pause, "the flusher's pause")
	}
	stop()
	changing.Wait()
	return changes
}

// settle waits until the node's rules equal the calm node's. It returns the time for that, and
// the result of the node without canaryd. In iptables mode it causes no syncs, because canaryd
// removes a doubled jump only after its owner has been quiet for 15 s.
func (s *storm) settle() (took time.Duration, bare string) {
	s.Helper()
	start, bareTook := time.Now(), time.Duration(0)
	var left difference
	testkit.Until(s.T, "the node's rules to be those of a kube-proxy that was never flushed", func() error {
		if s.kind.mode == inNFTables {
			s.town.synced(s.T, s.node, s.bare, s.calm)
		}
		if bareTook == 0 {
			if left = s.against(s.bare.space); left.none() {
				bareTook = time.Since(start)
			}
		}
		if took == 0 {
			d := s.against(s.node.space)
			if !d.none() {
				return errors.New(d.String())
			}
			took = time.Since(start)
		}
		if bareTook == 0 && time.Since(start) < bareFor {
			return errors.New("the node without canaryd differs")
		}
		return nil
	})
	if bareTook == 0 {
		return took, fmt.Sprintf("%d, %d, %d after %.1f s", left.missing, left.stale, left.doubled, time.Since(start).Seconds())
	}
	return took, fmt.Sprintf("0, 0, 0 after %.1f s", bareTook.Seconds())
}

// against compares a node's rules with the calm node's.
func (s *storm) against(one *space) difference {
	s.Helper()
	want, err := s.calm.space.read(s.Context(), s.kind.mode)
	s.Must(err)
	got, err := one.read(s.Context(), s.kind.mode)
	s.Must(err)
	if len(want) < slots {
		s.Fatalf("the calm kube-proxy has %d chains and sets only", len(want))
	}
	return compare(want, got)
}

// judge waits for the end, and reports the results.
func (s *storm) judge(h *hand, changes int, number uint64) {
	took, bare := s.settle()
	s.Stays(3, "that equal rules stay so", func() error {
		if d := s.against(s.node.space); !d.none() {
			return errors.New(d.String())
		}
		return nil
	})
	moved := s.against(s.node.space).moved
	s.Until("canaryd to be ready", nodetest.Ready)
	outcomes, absent, falsely := map[string]int{}, time.Duration(0), 0
	var noticed []float64
	s.collect()
	records := s.records
	if len(records) == 0 {
		s.Fatalf("no flush record of %d flushes\n%s", len(h.blows), s.canaryd.Log())
	}
	for _, r := range records {
		outcomes[r.Outcome]++
		noticed = append(noticed, r.NoticedSeconds)
		absent = max(absent, time.Duration(r.AbsentSeconds*float64(time.Second)))
		if h.during(r.Time, r.Time.Add(time.Duration(r.NoticedSeconds*float64(time.Second)))) == nil {
			falsely++
			s.Errorf("a record of a flush that was none: %+v", r)
		}
	}
	slices.Sort(noticed)
	with, without := s.node.syncs(), s.bare.syncs()
	names := map[string]int{}
	for _, b := range h.blows {
		names[b.name]++
	}
	row := func(what, with, without string) string { return fmt.Sprintf("  %-34s %-26s %s", what, with, without) }
	failures := func(s syncs) string { return fmt.Sprintf("%d (%d: a rule came back)", s.failed, s.cameBack) }
	report(s.T,
		fmt.Sprintf("%s (seed %d): %d flushes of %d kinds, %d changes", s.kind.name, number, len(h.blows), len(names), changes),
		row("", "with canaryd", "without"),
		row("missing, stale, doubled rules", fmt.Sprintf("0, 0, 0 after %.1f s", took.Seconds()), bare),
		row("chains with jumps in another order", strconv.Itoa(moved), strconv.Itoa(s.against(s.bare.space).moved)),
		row("syncs, full ones, by its Monitor", fmt.Sprintf("%d, %d, %d", with.all, with.full, with.reloads), fmt.Sprintf("%d, %d, %d", without.all, without.full, without.reloads)),
		row("failed syncs of kube-proxy", failures(with), failures(without)),
		row("flush records", fmt.Sprintf("%d (%s)", len(records), listOf(outcomes)), ""),
		row("false flushes", strconv.Itoa(falsely), ""),
		row("noticed", fmt.Sprintf("median %.2f s, longest %.2f s", noticed[len(noticed)/2], noticed[len(noticed)-1]), ""),
		row("longest absence", fmt.Sprintf("%.2f s", absent.Seconds()), ""),
		row("canaryd's processor time", fmt.Sprintf("%.1f s", s.canaryd.CPU().Seconds()), ""),
		"  flushes: "+listOf(names))
	for _, p := range []*proxy{s.node, s.bare} {
		for _, c := range p.complaints() {
			s.Logf("kube-proxy in %s, %s: %.700s", p.space.name, h.when(c.at), c.text)
		}
	}
	for _, b := range h.blows {
		s.Logf("%s to %s: %s", b.start.Format("15:04:05.000"), b.end.Format("15:04:05.000"), b.name)
	}
	s.Logf("canaryd's log:\n%s", s.canaryd.Log())
	for outcome := range outcomes {
		if !slices.Contains([]string{"proved", "raced", "skipped"}, outcome) {
			s.Errorf("%d flush records ended %s", outcomes[outcome], outcome)
		}
	}
	if len(records) < len(h.blows)/3 {
		s.Errorf("%d flush records of %d flushes", len(records), len(h.blows))
	}
}

// when describes a time by the last flush before it.
func (h *hand) when(at time.Time) string {
	for i := len(h.blows) - 1; i >= 0; i-- {
		if b := h.blows[i]; !at.Before(b.start) {
			return fmt.Sprintf("%.2f s after the end of %q", at.Sub(b.end).Seconds(), b.name)
		}
	}
	return "before any flush"
}

// listOf returns names with their numbers.
func listOf(n map[string]int) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(n)) {
		all = append(all, fmt.Sprintf("%d %s", n[name], name))
	}
	return strings.Join(all, ", ")
}
