package daemon

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// war flushes nat of IPv4 at that interval for that time, and returns the number of restores.
func (r *rig) war(every, length time.Duration) int {
	r.t.Helper()
	restores := r.fake.Restores()
	for end := time.Now().Add(length); time.Now().Before(end); {
		r.flushNat()
		r.after(every)
	}
	return r.fake.Restores() - restores
}

// logged counts lines of the log.
func (r *rig) logged(text string) int { return strings.Count(r.log.String(), text) }

// TestWar: another process keeps flushing. Replays are limited, the loss is visible, and the
// log has one line for the beginning and one for the end. Two seconds after the last flush
// everything is back.
func TestWar(t *testing.T) {
	for every, length := range map[time.Duration]time.Duration{
		7 * time.Millisecond: 12 * time.Second, 100 * time.Millisecond: time.Minute, 700 * time.Millisecond: time.Minute,
	} {
		t.Run(every.String(), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				before, left := r.tables(), leftBy(t, backend, "flush-nat")
				replays := func() float64 {
					got := r.metrics("replays_total{", "replays_total")
					return got["replays_total{family=ipv4,result=proved}"] + got["replays_total{family=ipv4,result=raced}"]
				}
				restores := r.war(every, length)
				// Eleven replays come at once, and then one each 1.5 s.
				if n, rate := replays(), length.Seconds()/1.5; n < rate/2 || n > 12+rate {
					t.Errorf("%g replays in %s (%d restores)", n, length, restores)
				}
				if s := r.d.Status(); !s.Contended || r.metrics("contended")["contended"] != 1 {
					t.Errorf("contended: %t, %v", s.Contended, r.metrics("contended"))
				}
				if n := r.logged("A process keeps undoing"); n != 1 {
					t.Errorf("the log has the beginning %d times", n)
				}
				if n := r.logged("Rules were lost"); n > 20 {
					t.Errorf("the log has %d flushes", n)
				}
				if got := r.metrics("flush_events"); got["flush_events_total"] < 10 {
					t.Errorf("counted: %v", got)
				}
				r.after(2*time.Second - every)
				r.wantBack(before, left)
				events := r.metrics("flush_events")["flush_events_total"]
				r.after(12 * time.Second)
				if s := r.d.Status(); s.Contended || len(r.metrics("contended")) != 0 {
					t.Error("contended for ever")
				}
				if n := r.logged("stay in place again"); n != 1 {
					t.Errorf("the log has the end %d times", n)
				}
				r.wantBack(before, left)
				// The next single flush is reported and healed as any other.
				r.flushNat()
				r.after(30 * time.Millisecond)
				r.wantBack(before, left)
				if got := r.metrics("flush_events")["flush_events_total"]; got != events+1 {
					t.Errorf("%g flush events after the war, want 1", got-events)
				}
			})
		})
	}
}

// TestNoWar: one flush, a few in a row, or one each few seconds are no war, and their replays
// do not wait.
func TestNoWar(t *testing.T) {
	for _, test := range []struct {
		times int
		every time.Duration
	}{{1, time.Second}, {3, 100 * time.Millisecond}, {6, 400 * time.Millisecond}, {9, 2 * time.Second}, {5, 11 * time.Second}} {
		t.Run(fmt.Sprintf("%d every %s", test.times, test.every), func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				before, left := r.tables(), leftBy(t, backend, "flush-nat")
				for range test.times {
					r.flushNat()
					r.after(30 * time.Millisecond)
					r.wantBack(before, left)
					r.after(test.every - 30*time.Millisecond)
				}
				if s := r.d.Status(); s.Contended || r.logged("A process keeps undoing") != 0 {
					t.Error("that is called a war")
				}
				if records := r.records(0); len(records) != min(test.times, flushes.Kept) {
					t.Errorf("%d records", len(records))
				}
			})
		})
	}
}

// TestWarOfJumps: another process deletes a jump by name after each replay. Each time canaryd
// waits for the grace, and it reports the war.
func TestWarOfJumps(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()
		deleteJump := func() bool {
			for _, rule := range r.tables()[rules.IPv4][rules.Nat].Chain("POSTROUTING").Rules {
				if rule.Target == "KUBE-POSTROUTING" {
					r.write(rules.Nat, "-D POSTROUTING "+rule.Spec)
					return true
				}
			}
			return false
		}
		deleted := 0
		for end := time.Now().Add(time.Minute + 10*time.Second); time.Now().Before(end); r.after(500 * time.Millisecond) {
			if deleteJump() {
				deleted++
			}
		}
		if deleted < 4 || deleted > 5 {
			t.Errorf("the jump was repaired %d times in 70 s, want once in the grace of 15 s", deleted-1)
		}
		if s := r.d.Status(); !s.Contended {
			t.Error("nobody is told")
		}
		if n := r.logged("A process keeps undoing"); n != 1 {
			t.Errorf("the log has the beginning %d times", n)
		}
		r.after(15*time.Second + 500*time.Millisecond)
		r.wantBack(before, before)
		r.after(30 * time.Second)
		if r.d.Status().Contended || r.logged("stay in place again") != 1 {
			t.Error("contended for ever")
		}
	})
}

// TestWarWithinReplays: a process that bypasses every guard undoes each replay before its
// proof. canaryd tries at the limit's rate and does not slow down, so that everything is back
// soon after the last flush.
func TestWarWithinReplays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		var war atomic.Bool
		var blows atomic.Int32
		r := run(t, fake, setup{kernel: stepping{fake, func(what string, _ iptables.Session) {
			if what == "restored" && war.Load() {
				blows.Add(1)
				must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			}
		}}})
		r.settled()
		before, left := r.tables(), leftBy(t, iptables.NFT, "flush-nat")
		war.Store(true)
		r.flushNat()
		r.after(time.Minute)
		r.wantNotReady("ipv4 nat is")
		if n := blows.Load(); n < 30 || n > 55 {
			t.Errorf("%d tries in a minute", n)
		}
		war.Store(false)
		r.after(2 * time.Second)
		r.wantBack(before, left)
		if record := r.oneRecord(); record.Outcome != reload.Proved && record.Outcome != reload.Raced {
			t.Errorf("the record says %+v", record)
		}
	})
}

// TestSlowWar: another process undoes each replay, too slowly for any limit. canaryd reports
// that too, of each kind of table, and refuses a drill.
func TestSlowWar(t *testing.T) {
	war := func(t *testing.T, r *rig, flush, wantBack func()) {
		for n := range 20 {
			if got := r.d.Status().Contended; got != (n > 10) {
				t.Errorf("after %d replays, contended: %t", n, got)
			}
			flush()
			r.after(30 * time.Millisecond)
			wantBack()
			r.after(5 * time.Second)
		}
		if n := r.logged("A process keeps undoing"); n != 1 {
			t.Errorf("the log has the beginning %d times", n)
		}
		if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, "a process keeps undoing them") {
			t.Errorf("a drill in the middle: %+v", reply)
		}
		r.after(6 * time.Second)
		if r.d.Status().Contended || r.logged("stay in place again") != 1 {
			t.Error("contended for ever")
		}
	}
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, left := r.tables(), leftBy(t, backend, "flush-nat")
		war(t, r, func() { r.flushNat() }, func() { r.wantBack(before, left) })
	})
	t.Run("native", func(t *testing.T) {
		nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
			war(t, r, k.flushRuleset, func() { k.wantNative(t, tableOf(proxyTable, "a", "b")) })
		})
	})
}

// TestClientsPutNothingOff: clients of HTTP cost the daemon processor time. That delays no
// replay, also while a process keeps flushing.
func TestClientsPutNothingOff(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		began := time.Now()
		r := start(t, backend, setup{cpu: func() time.Duration { return time.Since(began) / 2 }})
		before := r.tables()
		for i := range 60 {
			r.flushNat()
			r.after(500 * time.Millisecond)
			if s := r.d.Status(); s.Ready() != nil {
				t.Fatalf("flush %d is not answered after 0.5 s: %v", i, s.Ready())
			}
			r.after(4500 * time.Millisecond)
		}
		if !r.d.Status().Contended {
			t.Error("no contention")
		}
		r.wantBack(before, leftBy(t, backend, "flush-nat"))
	})
}
