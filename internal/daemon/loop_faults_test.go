package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

var errInjected = errors.New("injected: the kernel does not answer")

// flushNat is the flush of most tests of this package.
func (r *rig) flushNat() {
	r.t.Helper()
	must(r.t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
}

var lostNat = scenario.Lost{rules.IPv4.Table(rules.Nat): scenario.Emptied}

// wantOnlyNat fails unless one flush is reported and counted, that of nat.
func (r *rig) wantOnlyNat() {
	r.t.Helper()
	wantMoved(r.t, r.metrics("flush_events", "flushes"), series{
		"flush_events_total": 1, "flushes_total{family=ipv4,kind=emptied,table=nat}": 1,
	})
	record := r.oneRecord()
	if record.Kind != canary.Emptied || !slices.Equal(record.Families, []rules.Family{rules.IPv4}) || !slices.Equal(record.Tables, []rules.TableName{rules.Nat}) {
		r.t.Errorf("the record says %s of %v %v", record.Kind, record.Families, record.Tables)
	}
}

// TestProbesFail: while probes fail, canaryd replays nothing and is not healthy. It heals a
// flush of that time when the fault ends.
func TestProbesFail(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()
		left := leftBy(t, backend, "flush-nat")
		begins := r.fake.Begins()
		unknown := r.moved(func() {
			r.fake.FailProbes(errInjected)
			r.flushNat()
			r.after(10500 * time.Millisecond)
			r.wantNotReady("unknown")
			if n := r.fake.Begins() - begins; n != 0 {
				t.Errorf("%d sessions begun while nothing could be seen", n)
			}
		}, lossMetrics...)
		wantMoved(t, unknown, series{})
		got := r.metrics("probes_total")
		if got["probes_total{family=ipv4,result=unknown}"] < 10 || got["probes_total{family=ipv4,result=loss}"] != 0 {
			t.Errorf("probes: %v", got)
		}
		if n := strings.Count(r.log.String(), errInjected.Error()); n > 2 {
			t.Errorf("the same trouble was logged %d times, want once per family", n)
		}
		r.fake.FailProbes(nil)
		r.after(1100 * time.Millisecond)
		r.wantBack(before, left)
		r.wantOnlyNat()
		if got := r.oneRecord(); got.Outcome != reload.Proved {
			t.Errorf("the record says %+v", got)
		}
	})
}

// TestUnreadableSaysWhy: the status has the kernel's words for a failure, and no other words,
// because an error of iptables may quote a rule.
func TestUnreadableSaysWhy(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("listing the chains of nat: %w", syscall.EPERM), "operation not permitted"},
		{fmt.Errorf("iptables-save: %w", context.DeadlineExceeded), "it took too long"},
		{errors.New("iptables-save: -A KUBE-SERVICES -d 10.0.0.1/32: bad rule"), ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, iptables.NFT, setup{})
			r.fake.FailProbes(c.err)
			r.after(3 * time.Second)
			r.wantNotReady("unknown")
			var want map[rules.Family]string
			if c.want != "" {
				want = map[rules.Family]string{rules.IPv4: c.want, rules.IPv6: c.want}
			}
			if diff := cmp.Diff(want, r.d.Status().Public().Unreadable); diff != "" {
				t.Errorf("%v: why the families cannot be read (-want +got):\n%s", c.err, diff)
			}
			r.fake.FailProbes(nil)
			r.after(3 * time.Second)
			if got := r.d.Status().Unreadable; got != nil {
				t.Errorf("%v is over, and the status still says %v", c.err, got)
			}
		})
	}
}

// TestReadsFail: the probe shows a loss, and the read that should judge it fails.
func TestReadsFail(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, left := r.tables(), leftBy(t, backend, "flush-nat")
		restores := r.fake.Restores()
		r.fake.FailReads(errInjected)
		r.flushNat()
		r.after(5 * time.Second)
		if s := r.d.Status(); s.Healthy || s.LossSince.IsZero() {
			t.Errorf("healthy: %t, loss since %v", s.Healthy, s.LossSince)
		}
		if n := r.fake.Restores() - restores; n != 0 {
			t.Errorf("%d restores without a read", n)
		}
		r.fake.FailReads(nil)
		r.after(30 * time.Second)
		r.wantBack(before, left)
		r.wantOnlyNat()
		if got := r.metrics("rules_absent"); got["rules_absent_seconds"] != 1 {
			t.Errorf("metrics: %v", got)
		}
	})
}

// TestLockHeld: another process flushes and keeps the xtables lock. The table is unknown or
// still lost, and the release of the lock is the hint.
func TestLockHeld(t *testing.T) {
	for _, readsToo := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := start(t, iptables.Legacy, setup{})
			before, left := r.tables(), leftBy(t, iptables.Legacy, "flush-nat")
			r.fake.ReadsNeedLock(readsToo)
			restores := r.fake.Restores()
			release := r.fake.HoldLock()
			must(t, r.fake.Bypassing().Flush(rules.IPv4, rules.Nat, ""))
			r.after(8 * time.Second)
			if readsToo {
				r.wantNotReady("unknown")
			} else {
				r.wantNotReady("emptied")
				if n := r.metrics("restore_failures_total")["restore_failures_total{family=ipv4,reason=lock}"]; n == 0 {
					t.Error("the held lock is not counted")
				}
				r.wantLog("fuser")
			}
			if n := r.fake.Restores() - restores; n != 0 {
				t.Errorf("%d restores without the lock", n)
			}
			if len(r.metrics("rules_absent")) != 0 || r.metrics("replays")["replays_total{family=ipv4,result=proved}"] != 0 {
				t.Error("something counts as done")
			}
			r.after(300 * time.Millisecond)
			release()
			r.after(300 * time.Millisecond)
			r.wantBack(before, left)
			r.wantOnlyNat()
			if got := r.oneRecord(); got.Outcome != reload.Proved {
				t.Errorf("the record says %+v", got)
			}
		})
	}
}

// TestTheOwnerIsFasterThanTheLock: the owner restores flushed rules before canaryd has the
// lock, and so before any guarded read. The waiting record stays, with the known facts.
func TestTheOwnerIsFasterThanTheLock(t *testing.T) {
	for name, pause := range map[string]bool{"a replay": false, "a pause": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.Legacy, setup{})
				owner, saved := r.fake.Bypassing(), r.fake.Save(rules.IPv4)
				moved := r.moved(func() {
					release := r.fake.HoldLock()
					must(t, owner.Flush(rules.IPv4, rules.Nat, ""))
					r.after(8 * time.Second)
					waiting := r.oneRecord()
					if waiting.Outcome != api.WaitingLock || !waiting.Lost.Unread {
						t.Errorf("while the lock is held the record says %+v", waiting)
					}
					if pause {
						must(t, errorOf(r.d.Pause(t.Context(), api.PauseRequest{Seconds: 3600})))
					}
					must(t, owner.Restore(rules.IPv4, saved))
					release()
					r.after(5 * time.Second)
					if !pause {
						r.wantReady()
					}
					if got := r.oneRecord(); got.ID != waiting.ID || got.Outcome != reload.Skipped || !got.AbsentAtMost || got.AbsentSeconds < 7 || got.Open() {
						t.Errorf("the record says %+v", got)
					}
				}, "flush_events", "flushes", "rules_absent_seconds", "loss_since")
				wantMoved(t, moved, series{"flush_events_total": 1, "flushes_total{family=ipv4,kind=emptied,table=nat}": 1, "rules_absent_seconds": 1})
				r.wantLog("The rules are back: their owner wrote them")
			})
		})
	}
}

// TestLockHeldWithoutFlush: a held lock is no flush.
func TestLockHeldWithoutFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.Legacy, setup{})
		r.fake.ReadsNeedLock(true)
		moved := r.moved(func() {
			release := r.fake.HoldLock()
			r.after(time.Minute)
			r.wantNotReady("unknown")
			release()
			r.after(100 * time.Millisecond)
		}, lossMetrics...)
		wantMoved(t, moved, series{})
		r.wantReady()
	})
}

// TestUnreadableTable: a table that cannot be read is unknown. canaryd heals the others anyway,
// and does not keep trying that one.
func TestUnreadableTable(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before := r.tables()
		planted := len(r.fake.Payloads(rules.IPv4))
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, errInjected)
		must(t, scenario.All()[0].Do(t.Context(), r.programs()))
		r.settled()
		if got := r.d.Status().Families[rules.IPv4]; got[rules.Nat] != canary.Intact || got[rules.Mangle] != canary.Intact || got[rules.Filter] == canary.Intact {
			t.Errorf("verdicts: %v", got)
		}
		for _, payload := range r.fake.Payloads(rules.IPv4)[planted:] {
			if strings.Contains(payload, "*filter") {
				t.Error("a table that could not be read was written")
			}
		}
		r.after(time.Minute)
		reads := r.fake.Reads()
		r.after(time.Minute)
		if n := r.fake.Reads() - reads; n > 4*60 {
			t.Errorf("%d reads in a minute", n)
		}
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, nil)
		r.after(time.Minute)
		r.wantReady()
		for _, chain := range []string{"KUBE-FORWARD", "CNI-FORWARD", "KUBE-FIREWALL"} {
			if want := before[rules.IPv4][rules.Filter].Chain(chain); want != nil && len(r.chain(rules.IPv4, rules.Filter, chain)) != len(want.Rules) {
				t.Errorf("%s is not back", chain)
			}
		}
	})
}

// TestUnreadableAtStart: canaryd cannot read a table with a native rule. It plants marks in the
// others, and then rests.
func TestUnreadableAtStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		fake.DropTableFromReads(rules.IPv4, rules.Filter, errInjected)
		r := run(t, fake, setup{})
		r.after(time.Minute)
		r.wantNotReady("ipv4 filter is unknown")
		if n := len(r.metrics("canary_present")); n != 5 {
			t.Errorf("%d canaries, want 5", n)
		}
		r.flushNat()
		r.settled()
		if got := r.d.Status().Families[rules.IPv4]; got[rules.Nat] != canary.Intact || got[rules.Filter] != canary.Unknown {
			t.Errorf("after a flush of nat: %v", got)
		}
		if n := r.fake.Begins(); n > 20 {
			t.Errorf("%d sessions in a minute", n)
		}
		r.fake.DropTableFromReads(rules.IPv4, rules.Filter, nil)
		r.after(time.Minute)
		r.wantReady()
	})
}

// TestRestoresFail: canaryd tries again after 100 ms, doubling to 30 s, until the loss ends.
// All of that is one flush event.
func TestRestoresFail(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		before, left := r.tables(), leftBy(t, backend, "flush-nat")
		var tries []time.Time
		r.fake.BeforeRestore(func() { tries = append(tries, time.Now()) })
		// After each refusal a restore without rules follows at once. Its refusal shows that
		// single rules are not the reason.
		const refusals = 13
		r.fake.FailRestores(2*refusals, iptables.ReasonMissingSet)
		moved := r.moved(func() {
			r.flushNat()
			r.after(2 * time.Minute)
			r.wantNotReady("ipv4 nat is emptied")
			if s := r.d.Status(); s.LossSince.IsZero() || s.Flushes[0].Outcome != reload.Failed || s.Flushes[0].Detail == "" {
				t.Errorf("loss since %v, record %+v", s.LossSince, s.Flushes[0])
			}
			if len(r.metrics("rules_absent")) != 0 || len(r.metrics("loss_since")) != 1 {
				t.Error("the loss is not open any more")
			}
			r.after(4 * time.Minute)
		}, lossMetrics...)
		want := healed(lostNat, 1)
		want["replays_total{family=ipv4,result=failed}"] = refusals
		want["replays_total{family=ipv6,result=skipped}"] += refusals
		want["restore_failures_total{family=ipv4,reason=missing_set}"] = refusals
		wantMoved(t, moved, want)
		var waits []time.Duration
		for i := range refusals {
			waits = append(waits, tries[2*(i+1)].Sub(tries[2*i]).Round(50*time.Millisecond))
		}
		wait, backOff := 100*time.Millisecond, []time.Duration{}
		for range refusals {
			backOff, wait = append(backOff, wait), min(2*wait, 30*time.Second)
		}
		if diff := cmp.Diff(backOff, waits); diff != "" {
			t.Errorf("waits between tries (-want +got):\n%s", diff)
		}
		r.wantBack(before, left)
		if record := r.oneRecord(); record.Outcome != reload.Proved || record.AbsentSeconds < 120 {
			t.Errorf("the record says %+v", record)
		}
	})
}

// TestHalfReplays: a restore fails in the middle, or reports writes that it did not make. The
// proof finds that, and canaryd completes the replay.
func TestHalfReplays(t *testing.T) {
	faults := map[string]func(*iptablestest.Fake){
		"partial": func(f *iptablestest.Fake) { f.PartialCommit(2) },
		"lie":     func(f *iptablestest.Fake) { f.Lie(3) },
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				before, left := r.tables(), leftBy(t, backend, "flush-all")
				fault(r.fake)
				must(t, scenario.All()[0].Do(t.Context(), r.programs()))
				// By now the first try has failed. The next one follows 20 or 100 ms later.
				r.after(30 * time.Millisecond)
				r.wantNotReady("emptied")
				if s := r.d.Status(); s.LossSince.IsZero() || len(r.metrics("rules_absent")) != 0 {
					t.Error("half a replay counts as done")
				}
				r.settled()
				r.wantBack(before, left)
				got := r.metrics("flush_events", "flushes", "rules_absent")
				if got["flush_events_total"] != 1 || got["rules_absent_seconds"] != 1 {
					t.Errorf("metrics: %v", got)
				}
				for key, v := range got {
					if strings.HasPrefix(key, "flushes") && v != 1 {
						t.Errorf("%s is %v", key, v)
					}
				}
				if record := r.oneRecord(); record.Outcome != reload.Proved && record.Outcome != reload.Skipped {
					t.Errorf("the record says %+v", record)
				}
			})
		})
	}
}

// TestOwnerIsFaster: kube-proxy writes a chain again between canaryd's read and its restore,
// which overwrites it. The write counts as raced, and canaryd makes kube-proxy sync once more.
func TestOwnerIsFaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		const newer = "-p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ"
		sync := section(rules.Nat, ":KUBE-NODEPORTS - [0:0]", ":KUBE-MARK-MASQ - [0:0]",
			"-A KUBE-NODEPORTS "+newer, "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000")
		written, synced := false, 0
		r.fake.BeforeRestore(func() {
			if !written {
				written = true
				must(t, r.fake.As(77, "kube-proxy").RestoreNoflush(rules.IPv4, sync))
			}
		})
		r.flushNat()
		for range 60 { // kube-proxy's monitor looks each second
			r.after(time.Second)
			if r.chain(rules.IPv4, rules.Mangle, "KUBE-PROXY-CANARY") == nil {
				synced++
				r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
				must(t, r.fake.As(77, "kube-proxy").RestoreNoflush(rules.IPv4, sync))
			}
		}
		r.wantReady()
		if record := r.oneRecord(); record.Outcome != reload.Raced {
			t.Errorf("the outcome is %s, want raced", record.Outcome)
		}
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-NODEPORTS"); synced != 1 || !slices.Equal(got, []string{newer}) {
			t.Errorf("after %d syncs kube-proxy's chain holds %q", synced, got)
		}
		r.flushNat()
		r.settled()
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-NODEPORTS"); !slices.Equal(got, []string{newer}) {
			t.Errorf("after another flush kube-proxy's chain holds %q", got)
		}
	})
}

// TestOwnerComesFirst: the owner writes a chain again while canaryd settles. canaryd does not
// overwrite it with the old rules.
func TestOwnerComesFirst(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		const newer = "-p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ"
		r.flushNat()
		r.after(10 * time.Millisecond)
		r.write(rules.Nat, "-A KUBE-NODEPORTS "+newer)
		r.after(5 * time.Second)
		r.wantReady()
		if got := r.chain(rules.IPv4, rules.Nat, "KUBE-NODEPORTS"); !slices.Equal(got, []string{newer}) {
			t.Errorf("the owner's chain holds %q", got)
		}
		if len(r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")) == 0 {
			t.Error("the rest is not back")
		}
	})
}
