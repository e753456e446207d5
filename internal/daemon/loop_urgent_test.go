package daemon

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The times for a read of a small table, and for a stamp.
const (
	urgentCost = 100 * time.Microsecond
	stampCost  = 50 * time.Microsecond
)

// A sizedKernel is a dearKernel whose stamps and urgent probes also take time.
type sizedKernel struct {
	*dearKernel
	probing atomic.Int64 // nanoseconds, stamps included
}

func (k *sizedKernel) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	time.Sleep(stampCost)
	k.probing.Add(int64(stampCost))
	return k.Fake.Stamp(ctx, f)
}

func (k *sizedKernel) ProbeOnly(ctx context.Context, f rules.Family, places []iptables.Place) (iptables.Probed, error) {
	time.Sleep(urgentCost)
	k.probing.Add(int64(urgentCost))
	return k.Fake.ProbeOnly(ctx, f, places)
}

// startSized starts a Daemon on a node with a large nat of IPv4 and otherwise small tables.
func startSized(t *testing.T) (*rig, *sizedKernel) {
	t.Helper()
	k := &sizedKernel{dearKernel: &dearKernel{Fake: loadedFake(t, iptables.Legacy), cost: 13 * time.Millisecond}}
	lines := []string{":KUBE-SERVICES - [0:0]", ":KUBE-SVC-LARGELARGELARGEL - [0:0]", "-A KUBE-SERVICES -j KUBE-SVC-LARGELARGELARGEL"}
	for n := range 500 {
		lines = append(lines, fmt.Sprintf("-A KUBE-SVC-LARGELARGELARGEL -d 10.1.%d.%d/32 -j RETURN", n/250, n%250))
	}
	must(t, k.RestoreNoflush(rules.IPv4, section(rules.Nat, lines...)))
	r := run(t, k.Fake, setup{kernel: k})
	r.after(time.Minute) // until the budgets are full
	r.wantReady()
	return r, k
}

// exhaust makes an owner replace an endpoint of the large table, which changes no fingerprint,
// until walks must wait.
func (r *rig) exhaust(k *sizedKernel) {
	r.endpoint(0, true)
	for n := range 1000 {
		r.endpoint(n, true)
		r.after(5 * time.Millisecond)
	}
	spent := k.spent.Load()
	r.endpoint(1, true)
	r.after(5 * time.Millisecond)
	if k.spent.Load() != spent {
		r.t.Fatal("the budget of walks is not used up")
	}
}

// small writes the n-th state of a chain in a small table that its owner keeps changing. The
// chain is never empty, because for some chains that would be a loss.
func (r *rig) small(chain string, n int) {
	lines := []string{":" + chain + " - [0:0]"}
	for i := range 1 + n%3 {
		lines = append(lines, fmt.Sprintf("-A %s -p tcp -m tcp --dport %d -j ACCEPT", chain, 80+i))
	}
	r.write(rules.Filter, lines...)
}

// noticed returns the time from a moment to the notice of the only new flush record.
func (r *rig) noticed(after time.Time, have int) time.Duration {
	r.t.Helper()
	records := r.records(have)
	if len(records) != 1 {
		r.t.Fatalf("%d records, want one", len(records))
	}
	return records[0].Time.Add(time.Duration(records[0].NoticedSeconds * float64(time.Second))).Sub(after)
}

// TestProbeUrgent: a flush leaves a small table, or half of a large one. canaryd notices it
// before it walks any large table, whether or not walks must wait.
func TestProbeUrgent(t *testing.T) {
	flushes := []iptables.Place{
		{Table: rules.Filter, Chain: "ipv6"}, {Table: rules.Nat, Chain: "ipv6"}, {Table: rules.Mangle, Chain: "ipv4"}, {Table: rules.Nat, Chain: "ipv4"},
	}
	for _, busy := range []bool{false, true} {
		for _, flush := range flushes {
			t.Run(fmt.Sprintf("%s %s, busy %t", flush.Chain, flush.Table, busy), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r, k := startSized(t)
					if busy {
						r.exhaust(k)
					}
					family := rules.IPv4
					if flush.Chain == "ipv6" {
						family = rules.IPv6
					}
					flushed := time.Now()
					must(t, r.fake.Flush(family, flush.Table, ""))
					r.after(5 * time.Second)
					if took := r.noticed(flushed, 0); took > 2*(urgentCost+stampCost) {
						t.Errorf("noticed after %s, want the time of two stamps and an urgent probe", took)
					}
					if record := r.oneRecord(); record.AbsentSeconds > 0.5 {
						t.Errorf("the record says %+v: what had to wait for a walk is no evidence of it", record)
					}
					r.wantReady()
				})
			})
		}
	}
}

// TestProbeUrgentLosesNoHint: a change shows in no fingerprint, and shares its hint with a
// loss, or with a hint that had to wait. canaryd finds it anyway.
func TestProbeUrgentLosesNoHint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startSized(t)
		r.endpoint(0, true)
		r.after(5 * time.Second)
		r.exhaust(k)
		r.after(10 * time.Second)
		r.endpoint(1, true) // as many rules as before
		must(t, r.fake.Flush(rules.IPv6, rules.Filter, ""))
		r.after(5 * time.Second)
		r.wantReady()
		r.oneRecord()
		want := "-p tcp -j DNAT --to-destination 10.9.0.1:80"
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-SEP-BUSYBUSYBUSYBUSY"); !slices.Equal(got, []string{want}) {
			t.Errorf("the endpoint is %v", got)
		}
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.after(5 * time.Second)
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-SEP-BUSYBUSYBUSYBUSY"); !slices.Equal(got, []string{want}) {
			t.Errorf("the endpoint came back as %v: its replacement was not learned", got)
		}
	})
}

// TestPostponedHint: a hint must wait even for its stamp. Later a walk answers it, although the
// stamp shows nothing then.
func TestPostponedHint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startSized(t)
		k.cost = 0 // walks need not wait
		r.endpoint(0, true)
		r.after(5 * time.Second)
		for range 3000 { // lists only; a change would cause an examination of both families
			k.HoldLock()()
			r.after(time.Millisecond)
		}
		stamps := k.Stamps()
		r.endpoint(1, true)
		r.after(0)
		if k.Stamps() != stamps {
			t.Fatal("the hint had not to wait")
		}
		r.after(3 * time.Second)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.after(5 * time.Second)
		want := "-p tcp -j DNAT --to-destination 10.9.0.1:80"
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-SEP-BUSYBUSYBUSYBUSY"); !slices.Equal(got, []string{want}) {
			t.Errorf("the endpoint came back as %v: its replacement was not learned", got)
		}
	})
}

// TestProbeUrgentIsNoLook: probeUrgent sees all its marks in force, and canaryd walks the
// family anyway. A restored old file changes no fingerprint, and may arrive with a change of a
// small table.
func TestProbeUrgentIsNoLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startSized(t)
		old := "-A " + canary.DefaultChain + " " + canary.NewNonce().Rule().Spec
		before := k.probing.Load()
		restored := time.Now()
		must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Filter, ":FOREIGN - [0:0]")+section(rules.Nat, ":"+canary.DefaultChain+" - [0:0]", old)))
		r.after(5 * time.Second)
		if k.probing.Load() == before {
			t.Error("the small table that moved was not probed")
		}
		if took := r.noticed(restored, 0); took > 3*k.cost {
			t.Errorf("a replaced canary was noticed after %s", took)
		}
		if kind := r.oneRecord().Kind; kind != canary.Replaced {
			t.Errorf("it was taken for %s", kind)
		}
	})
}

// TestPeeksBesideABusyWriter: a process never stops writing to a small table. Stamps and urgent
// probes cost no more than their share, and neither do walks of the large table that it leaves
// alone.
func TestPeeksBesideABusyWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startSized(t)
		const busy = time.Minute
		spent, before := k.spent.Load(), k.probing.Load()
		begin := time.Now()
		for n := 0; time.Since(begin) < busy; n++ {
			r.small("KUBE-FORWARD", n)
			r.after(5 * time.Millisecond)
		}
		took := time.Duration(k.probing.Load() - before)
		ticks := 4 * stampCost * time.Duration(busy/time.Second) // ticks wait for no budget
		if most := busy/pace.UrgentShare + ticks + 2*(pace.WalkBurst+urgentCost); took > most || took < busy/pace.UrgentShare/2 {
			t.Errorf("urgentProbes took %s in %s, want at most %s and not nearly nothing", took, busy, most)
		}
		took = time.Duration(k.spent.Load() - spent)
		if most := busy/pace.WalkShare + 2*(pace.WalkBurst+k.cost); took > most {
			t.Errorf("walks took %s in %s, want at most %s", took, busy, most)
		}
		r.after(time.Minute)
		r.wantReady()
	})
}
