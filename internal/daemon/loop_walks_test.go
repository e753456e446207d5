package daemon

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A dearKernel is a Fake whose probes take time, as walks of large tables do.
type dearKernel struct {
	*iptablestest.Fake
	cost  time.Duration
	spent atomic.Int64 // nanoseconds
}

func (k *dearKernel) Probe(ctx context.Context, f rules.Family, places []iptables.Place) (iptables.Probed, error) {
	time.Sleep(k.cost)
	k.spent.Add(int64(k.cost))
	return k.Fake.Probe(ctx, f, places)
}

// startDear starts a Daemon whose walks cost as much as with 20,000 rules.
func startDear(t *testing.T, s setup) (*rig, *dearKernel) {
	t.Helper()
	k := &dearKernel{Fake: loadedFake(t, iptables.Legacy), cost: 13 * time.Millisecond}
	s.kernel = k
	r := run(t, k.Fake, s)
	r.after(time.Minute) // until the budget is full
	r.wantReady()
	return r, k
}

// endpoint writes the n-th state of a chain that its owner keeps changing. It adds or deletes a
// rule, or replaces one, which changes no fingerprint.
func (r *rig) endpoint(n int, replace bool) {
	chain := ":KUBE-SEP-BUSYBUSYBUSYBUSY - [0:0]"
	if rule := fmt.Sprintf("-A KUBE-SEP-BUSYBUSYBUSYBUSY -p tcp -j DNAT --to-destination 10.9.0.%d:80", n%200); replace || n%2 == 0 {
		r.write(rules.Nat, chain, rule)
		return
	}
	r.write(rules.Nat, chain)
}

// TestWalksBesideABusyWriter: a process syncs a hundred times a second, with or without a
// changed fingerprint. Walks cost 2 % of a core at most, and canaryd heals a flush anyway.
func TestWalksBesideABusyWriter(t *testing.T) {
	for name, replace := range map[string]bool{"moved fingerprints": false, "replaced endpoints": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, k := startDear(t, setup{})
				busy := testkit.Size(30*time.Second, 2*time.Minute)
				spent := k.spent.Load()
				begin := time.Now()
				for n := 0; time.Since(begin) < busy; n++ {
					r.endpoint(n, replace)
					r.after(10 * time.Millisecond)
				}
				if r.d.Status().LearningPendingSince.IsZero() {
					t.Error("the generation passes for current while a change waits for its walk")
				}
				took := time.Duration(k.spent.Load() - spent)
				// Both families may spend a burst, and overdraw it by one walk.
				if most := busy/pace.WalkShare + 2*(pace.WalkBurst+k.cost); took > most {
					t.Errorf("walks took %s in %s, want at most %s", took, busy, most)
				}
				if least := busy / pace.WalkShare / 2; took < least {
					t.Errorf("walks took %s in %s: hardly anything was looked at", took, busy)
				}
				r.wantReady()

				must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
				flushed := time.Now()
				for n := 0; time.Since(flushed) < 5*time.Second; n++ {
					r.endpoint(n, replace)
					r.after(10 * time.Millisecond)
				}
				r.after(time.Minute)
				r.wantReady()
				got := r.oneRecord()
				if got.Outcome != reload.Proved || got.AbsentSeconds > 3 {
					t.Errorf("the record says %+v", got)
				}
				if late := got.Time.Sub(flushed); late > 0 {
					t.Errorf("the first evidence was %s after the flush", late)
				}
			})
		})
	}
}

// TestWalksAfterQuietAreImmediate: many flushes happen on an otherwise quiet node. canaryd
// notices each after one walk, however costly.
func TestWalksAfterQuietAreImmediate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startDear(t, setup{})
		for n := range 50 {
			must(t, r.fake.Flush(rules.IPv6, rules.Filter, ""))
			r.after(2 * time.Second)
			records := r.records(n)
			if len(records) != 1 {
				t.Fatalf("flush %d: %d records", n, len(records))
			}
			if noticed := time.Duration(records[0].NoticedSeconds * float64(time.Second)); noticed > 2*k.cost+time.Millisecond {
				t.Errorf("flush %d was noticed after %s, want after one walk of each family, %s", n, noticed, 2*k.cost)
			}
			r.after(flushes.FoldWithin) // each has its own record
		}
		r.wantReady()
	})
}

// A sluggishKernel is so slow with stamps that those of the ticks use up their budget. Every
// hint then waits for the next tick.
type sluggishKernel struct{ *iptablestest.Fake }

func (k sluggishKernel) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	time.Sleep(60 * time.Millisecond)
	return k.Fake.Stamp(ctx, f)
}

// TestHintThatWaitsForAStampIsPending: canaryd has heard of a write, and has not looked yet. It
// does not claim meanwhile that the generation has the last write.
func TestHintThatWaitsForAStampIsPending(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := sluggishKernel{loadedFake(t, iptables.Legacy)}
		r := run(t, k.Fake, setup{kernel: k})
		r.after(time.Minute + 500*time.Millisecond)
		r.wantReady()
		wrote, before := time.Now(), r.d.Status().Generation.ID
		r.endpoint(0, true)
		r.after(10 * time.Millisecond)
		if s := r.d.Status(); !s.LearningPendingSince.Equal(wrote) || s.Generation.ID != before {
			t.Errorf("written at %v, and pending since %v", wrote, s.LearningPendingSince)
		}
		r.after(2 * time.Second)
		if s := r.d.Status(); !s.LearningPendingSince.IsZero() || s.Generation.ID == before {
			t.Errorf("pending since %v", s.LearningPendingSince)
		}
	})
}

// TestBypassedLock: a writer uses another lock, and so gives no hint. The tick sees a changed
// fingerprint. A replaced endpoint changes none, and the walk each 30 s finds it.
func TestBypassedLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k := startDear(t, setup{})
		generation := func() string { return r.d.Status().Generation.ID }
		chain := ":KUBE-SEP-BUSYBUSYBUSYBUSY - [0:0]"
		bypass := func(to string) {
			t.Helper()
			must(t, k.Bypassing().RestoreNoflush(rules.IPv4, section(rules.Nat, chain, "-A KUBE-SEP-BUSYBUSYBUSYBUSY -p tcp -j DNAT --to-destination "+to)))
		}
		first := generation()
		bypass("10.9.0.1:80")
		r.after(r.d.cfg.PollInterval + captureMost + 3*k.cost)
		second := generation()
		if second == first {
			t.Fatal("a chain that came was not noticed by the next tick")
		}
		r.after(5 * time.Second) // until the marks are renewed too

		hints := r.hints.Counts()
		bypass("10.9.0.2:80")
		replaced := time.Now()
		for generation() == second && time.Since(replaced) < time.Hour {
			r.after(100 * time.Millisecond)
		}
		if took := time.Since(replaced); took < quietWalk/2 || took > quietWalk+r.d.cfg.PollInterval+captureMost+3*k.cost {
			t.Errorf("a replaced endpoint was learned after %s, want with the walk that comes every %s", took, quietWalk)
		}
		r.after(time.Second)
		before := r.tables()

		flushed := time.Now()
		must(t, k.Bypassing().Flush(rules.IPv4, rules.Nat, ""))
		left := leftBy(t, iptables.Legacy, "flush-nat")
		r.after(r.d.cfg.PollInterval + 300*time.Millisecond)
		r.wantBack(before, left)
		r.wantOnlyNat()
		if late := r.oneRecord().Time.Sub(flushed); late > r.d.cfg.PollInterval {
			t.Errorf("the flush was noticed %s later, want within a tick", late)
		}
		if now := r.hints.Counts(); now["lock"] > hints["lock"]+4 {
			t.Errorf("hints of the lock: %d, before the replacement %d: the writer did not bypass it", now["lock"], hints["lock"])
		}
	})
}

// TestLockHeldAtTheStart: another process holds the lock, so canaryd can plant nothing, and
// counts that. The release ends it.
func TestLockHeldAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.Legacy)
		release := fake.HoldLock()
		r := run(t, fake, setup{})
		r.after(3 * time.Minute)
		r.wantNotReady("unknown")
		for _, f := range rules.Families() {
			name := fmt.Sprintf("restore_failures_total{family=%s,reason=lock}", f)
			if n := r.metrics("restore_failures_total")[name]; n < 5 {
				t.Errorf("%s is %v", name, n)
			}
		}
		if n := fake.Restores(); n != 0 {
			t.Errorf("%d restores without the lock", n)
		}
		release()
		r.after(500 * time.Millisecond)
		r.wantReady()
		wantMoved(t, r.metrics("flush_events", "flushes", "replays_total"), series{})
	})
}
