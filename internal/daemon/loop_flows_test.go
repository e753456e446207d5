package daemon

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// flows is a Tracker of untranslated flows.
type flows struct {
	mu    sync.Mutex
	held  []nat.Flow // of IPv4
	asked []rules.Family
	since []time.Time
	takes time.Duration
	err   error
}

func (*flows) Look(context.Context) (nat.Site, error) { return nodeSite{}, nil }

func (f *flows) Sweep(ctx context.Context, family rules.Family, since time.Time, by conntrack.Rules) (conntrack.Deleted, error) {
	deleted := conntrack.Deleted{ByProtocol: map[uint8]int{}}
	select {
	case <-time.After(f.takes):
	case <-ctx.Done():
		return deleted, ctx.Err()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked, f.since = append(f.asked, family), append(f.since, since)
	if family == rules.IPv4 {
		f.held = slices.DeleteFunc(f.held, func(flow nat.Flow) bool {
			if by.Translates(flow) {
				deleted.ByProtocol[flow.Protocol]++
				return true
			}
			return false
		})
	}
	return deleted, f.err
}

// left returns the destinations of the remaining flows, and the searched families.
func (f *flows) left() (destinations []string, asked []rules.Family) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, flow := range f.held {
		destinations = append(destinations, flow.Destination.String())
	}
	return destinations, f.asked
}

// nodeSite is a node with one address.
type nodeSite struct{}

func (nodeSite) Local(a netip.Addr) bool        { return a == netip.MustParseAddr("192.0.2.1") }
func (nodeSite) Beyond(string, netip.Addr) bool { return true }

func flowTo(protocol uint8, to string) nat.Flow {
	return nat.Flow{Protocol: protocol, Source: netip.MustParseAddrPort("10.1.7.9:4000"), Destination: netip.MustParseAddrPort(to)}
}

// begunMeanwhile returns flows to a cluster IP, a host port and a node port of the scenarios'
// node, and a flow to a stranger.
func begunMeanwhile() []nat.Flow {
	return []nat.Flow{
		flowTo(nat.UDP, "10.96.0.14:80"), flowTo(nat.UDP, "192.0.2.1:443"), flowTo(nat.SCTP, "192.0.2.1:30038"),
		flowTo(nat.TCP, "10.96.0.23:80"), flowTo(nat.UDP, "198.51.100.1:53"),
	}
}

// TestFlowsOfAnOutageEnd: after a replay of nat canaryd ends the flows that began without it,
// and counts them. After other replays it ends none.
func TestFlowsOfAnOutageEnd(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		tracker := &flows{held: begunMeanwhile()}
		r := start(t, backend, setup{flows: tracker})
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
		must(t, r.fake.Flush(rules.IPv6, rules.Mangle, ""))
		r.settled()
		if _, asked := tracker.left(); len(asked) > 0 {
			t.Errorf("flows of %v were searched, and nat was never lost", asked)
		}
		moved := r.moved(func() {
			r.flushNat()
			r.settled()
		}, "conntrack")
		wantMoved(t, moved, series{
			"conntrack_deleted_total{family=ipv4,protocol=udp}": 2, "conntrack_deleted_total{family=ipv4,protocol=sctp}": 1,
			"conntrack_deleted_total{family=ipv4,protocol=tcp}": 1,
		})
		left, asked := tracker.left()
		if !slices.Equal(left, []string{"198.51.100.1:53"}) || !slices.Equal(asked, []rules.Family{rules.IPv4}) {
			t.Errorf("left are flows to %v, searched were %v", left, asked)
		}
		r.wantLog("Ended flows that began while the rules were missing")
	})
}

// TestFlowsAreOfTheTimeSinceNatWasSeenIntact: rules may be missing since nat was last seen
// intact, even if the flush is noticed late. If one sweep serves two flushes, that time
// precedes the first.
func TestFlowsAreOfTheTimeSinceNatWasSeenIntact(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		tracker := &flows{held: begunMeanwhile(), takes: 2 * time.Second}
		r := start(t, backend, setup{flows: tracker})
		r.settled()
		var flushed []time.Time
		for range 3 { // one sweep serves the last two
			flushed = append(flushed, time.Now())
			r.flushNat()
			r.after(500 * time.Millisecond)
			r.wantReady()
		}
		r.after(2 * sweepTime)
		if len(tracker.since) != 2 {
			t.Fatalf("%d sweeps, want one for the first flush and one for the others", len(tracker.since))
		}
		for i, since := range tracker.since {
			if before := flushed[i].Sub(since); before < 0 || before > time.Minute {
				t.Errorf("sweep %d is for flows that began %v before the flush", i, before)
			}
		}
		if !tracker.since[1].After(flushed[0]) {
			t.Errorf("nat was intact after the first replay, and flows since %v before are searched", flushed[1].Sub(tracker.since[1]))
		}
	})
}

// TestAFlushDoesNotWaitForFlows: a search does not end. It costs a log line and a count, and
// neither delays nor fails the replays meanwhile. Later requests are served afterwards.
func TestAFlushDoesNotWaitForFlows(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		tracker := &flows{held: begunMeanwhile(), takes: time.Hour}
		r := start(t, backend, setup{flows: tracker})
		moved := r.moved(func() {
			for range 3 {
				r.flushNat()
				r.after(500 * time.Millisecond)
				r.wantReady()
			}
			must(t, r.fake.Flush(rules.IPv6, rules.Nat, ""))
			r.after(500 * time.Millisecond)
			r.wantReady()
			r.after(sweepTime)
		}, "conntrack", "replays_total")
		wantMoved(t, moved, series{
			"conntrack_errors_total{family=ipv4}":       1,
			"replays_total{family=ipv4,result=proved}":  3,
			"replays_total{family=ipv6,result=skipped}": 3,
			"replays_total{family=ipv6,result=proved}":  1,
			"replays_total{family=ipv4,result=skipped}": 1,
		})
		r.wantLog("Flows that began while the rules were missing may stay untranslated")
		r.after(2 * sweepTime)
		got := r.metrics("conntrack_errors_total")
		if got["conntrack_errors_total{family=ipv4}"] != 2 || got["conntrack_errors_total{family=ipv6}"] != 1 {
			t.Errorf("the flushes meanwhile were not followed by one more search of each family: %v", got)
		}
	})
}

// TestTroubleWithFlowsIsTold: deletions before the failure count too.
func TestTroubleWithFlowsIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tracker := &flows{held: begunMeanwhile(), err: errors.New("injected: conntrack says no")}
		r := start(t, iptables.NFT, setup{flows: tracker})
		moved := r.moved(func() { r.flushNat(); r.settled() }, "conntrack")
		wantMoved(t, moved, series{
			"conntrack_deleted_total{family=ipv4,protocol=udp}": 2, "conntrack_deleted_total{family=ipv4,protocol=sctp}": 1,
			"conntrack_deleted_total{family=ipv4,protocol=tcp}": 1,
			"conntrack_errors_total{family=ipv4}":               1,
		})
		r.wantReady()
		r.wantLog("injected: conntrack says no")
	})
}

// TestObserveEndsNoFlows: without a replay canaryd ends no flow.
func TestObserveEndsNoFlows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tracker := &flows{held: begunMeanwhile()}
		r := start(t, iptables.NFT, setup{flows: tracker, mode: api.Observe})
		r.flushNat()
		r.settled()
		if _, asked := tracker.left(); len(asked) > 0 {
			t.Errorf("flows of %v were searched in observe mode", asked)
		}
	})
}

// TestFlowsAreEndedBeforeTheDaemonIs: the rules are back, and canaryd finishes the sweep before
// it stops.
func TestFlowsAreEndedBeforeTheDaemonIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tracker := &flows{held: begunMeanwhile(), takes: time.Second}
		r := start(t, iptables.NFT, setup{flows: tracker})
		r.flushNat()
		r.after(500 * time.Millisecond)
		r.stop()
		if left, _ := tracker.left(); strings.Join(left, " ") != "198.51.100.1:53" {
			t.Errorf("left are flows to %v", left)
		}
	})
}

// TestFlowsOfNativeTables: canaryd restores a native table. Then it looks for flows of the
// table's families that began since the table was last known to be in force. It does so after a
// restore too.
func TestFlowsOfNativeTables(t *testing.T) {
	table := tableOf(proxyTable, "a", "b")
	table.Chains[0].Attrs = nft.AppendAttr(nil, unix.NFTA_CHAIN_TYPE, "nat", 1)
	table.Chains[0].Attrs = nft.AppendAttr(table.Chains[0].Attrs, unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED,
		nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, []byte{0, 0, 0, 0}, 0), 0)
	f := &flows{}
	nativeNode(t, setup{flows: f, guarded: newFakeNative(table, tableOf(dockerTable, "c"))}, func(t *testing.T, r *rig, k *fakeNative) {
		before := time.Now()
		k.flushRuleset()
		r.settled()
		if _, asked := f.left(); !slices.Equal(asked, []rules.Family{rules.IPv4}) {
			t.Errorf("searched %v, want ipv4 once", asked)
		}
		if since := f.since[0]; since.After(before) || before.Sub(since) > 2*time.Second {
			t.Errorf("flows since %s, want those since the last look before %s", since, before)
		}
		k.deleteTable(proxyTable)
		r.settled()
		if _, asked := f.left(); len(asked) != 1 {
			t.Errorf("searched %v although nothing was put back", asked)
		}
		_, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		must(t, err)
		r.settled()
		if _, asked := f.left(); len(asked) != 2 {
			t.Errorf("searched %v after a restore", asked)
		}
		newer := *table
		newer.Chains = append(newer.Chains[:2:2], native.Chain{Name: "later"})
		k.between = func() { k.sync(&newer) }
		k.flushRuleset()
		r.settled()
		if _, asked := f.left(); len(asked) != 3 {
			t.Errorf("searched %v after a replay whose table its owner changed before the proof", asked)
		}
	})
}

// TestWaitingSweeps: requests for native tables that arrive during a sweep are all served.
func TestWaitingSweeps(t *testing.T) {
	d := &Daemon{cfg: Config{Flows: &flows{}}, sweeps: make(chan sweep, 1)}
	for _, id := range []tableid.TableID{proxyTable, dockerTable, proxyTable} {
		d.askSweep(sweep{since: map[rules.Family]time.Time{id.Family: time.Now()}, native: []*native.Table{tableOf(id)}})
	}
	var ids []tableid.TableID
	for _, table := range (<-d.sweeps).native {
		ids = append(ids, table.ID)
	}
	if want := []tableid.TableID{proxyTable, dockerTable}; !slices.Equal(ids, want) {
		t.Errorf("the waiting sweep has %v, want %v", ids, want)
	}
}
