package daemon

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A suspended kernel answers one read of IPv4 after 30 s, with an error. That is as if canaryd
// was stopped during the read, and its child's time was over when it continued.
type suspended struct {
	*iptablestest.Fake
	armed atomic.Bool
}

func (s *suspended) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if f == rules.IPv4 && s.armed.Swap(false) {
		time.Sleep(30 * time.Second)
		return iptables.Snapshot{}, errors.New("iptables-nft-restore was killed: it did not end within 30s")
	}
	return s.Fake.Read(ctx, f)
}

// TestSuspendedInTheMiddleOfARead: canaryd knows the owners' writes of that time within another
// 30 s, because the read cost almost nothing.
func TestSuspendedInTheMiddleOfARead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &suspended{Fake: loadedFake(t, iptables.NFT)}
		r := run(t, k.Fake, setup{kernel: k, cpu: func() time.Duration { return 0 }})
		r.settled()
		before := r.d.Status().Generation.ID
		k.armed.Store(true)
		r.write(rules.Nat, "-A KUBE-SERVICES -s 192.0.2.9/32 -j RETURN")
		r.after(31 * time.Second)
		r.wantLog("could not be read")
		r.after(31 * time.Second)
		r.wantReady()
		if r.d.Status().Generation.ID == before {
			t.Error("the change is not known a minute after it")
		}
	})
}

// TestStoodStill: the loop does not run for 13 s, as after SIGSTOP, and the hints of that time
// have no time of their own. The absence of the rules is a bound then; right after that it is
// exact again.
func TestStoodStill(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k := newFakeNative(tableOf(proxyTable, "a", "b"))
		r := start(t, backend, setup{guarded: k})
		stop := make(chan struct{})
		go func() {
			must(t, r.d.ask(t.Context(), func(context.Context, *state) { <-stop }))
		}()
		r.after(500 * time.Millisecond)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		k.flushTable(proxyTable)
		time.Sleep(13 * time.Second)
		close(stop)
		r.settled()
		records := r.records(0)
		if len(records) == 0 {
			t.Fatal("no record")
		}
		for _, f := range records {
			noticed, bound := f.NoticedFor()
			if absent := api.Seconds(f.AbsentSeconds); !f.AbsentAtMost || !f.Stalled || absent < 13*time.Second || absent > 15*time.Second {
				t.Errorf("flush of %v %v: absent for %s, a bound: %t, canaryd stood still: %t", f.Tables, f.NativeNames(), absent, f.AbsentAtMost, f.Stalled)
			}
			if !bound || noticed < 13*time.Second || noticed > 15*time.Second {
				t.Errorf("flush of %v %v: noticed after %s, a bound: %t", f.Tables, f.NativeNames(), noticed, bound)
			}
		}
		r.wantLog("noticedAfterAtMost=")
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		if f := r.records(len(records)); len(f) != 1 || f[0].AbsentAtMost || f[0].AbsentSeconds > 1 {
			t.Errorf("the flush after that has %+v", f)
		}
	})
}

// A halted kernel answers one question for the stamp of IPv4 after 13 s: canaryd was stopped in
// the middle of a look.
type halted struct {
	*iptablestest.Fake
	armed atomic.Bool
}

func (h *halted) Stamp(ctx context.Context, f rules.Family) (iptables.Stamp, error) {
	if f == rules.IPv4 && h.armed.Swap(false) {
		time.Sleep(13 * time.Second)
	}
	return h.Fake.Stamp(ctx, f)
}

// TestStoodStillInALook: a look begins, canaryd is stopped, and a flush follows. The look then
// shows the loss; its beginning is not the time of the flush, which is not known.
func TestStoodStillInALook(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		h := &halted{Fake: loadedFake(t, backend)}
		r := run(t, h.Fake, setup{kernel: h, deaf: true})
		r.settled()
		h.armed.Store(true)
		r.after(12 * time.Second)
		must(t, h.Flush(rules.IPv4, rules.Nat, ""))
		flushed := time.Now()
		r.after(20 * time.Second)
		f := r.oneRecord()
		if !f.AbsentAtMost || !f.Stalled || f.LastInForce.IsZero() || f.LastInForce.After(flushed) {
			t.Errorf("flushed at %s; absent for %s from %s, a bound: %t, last in force at %s, canaryd stood still: %t",
				flushed, api.Seconds(f.AbsentSeconds), f.Time, f.AbsentAtMost, f.LastInForce, f.Stalled)
		}
	})
}

// TestStoodStillTwice: on a starved node a second standstill follows, in the read that shows the
// loss. The record's absence is counted from before the first one, in which the flush was.
func TestStoodStillTwice(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		k := newFakeNative(tableOf(proxyTable, "a", "b"))
		r := start(t, backend, setup{guarded: k, deaf: true})
		stop := make(chan struct{})
		go func() {
			must(t, r.d.ask(t.Context(), func(context.Context, *state) { <-stop }))
		}()
		r.after(500 * time.Millisecond)
		k.flushTable(proxyTable)
		k.with(func() { k.takes = 10 * time.Second })
		time.Sleep(13 * time.Second)
		close(stop)
		synctest.Wait()
		k.with(func() { k.takes = 0 })
		r.after(20 * time.Second)
		f := r.oneRecord()
		if absent := api.Seconds(f.AbsentSeconds); !f.AbsentAtMost || !f.Stalled || absent < 23*time.Second {
			t.Errorf("absent for %s from %s, a bound: %t, canaryd stood still: %t", absent, f.Time, f.AbsentAtMost, f.Stalled)
		}
	})
}
