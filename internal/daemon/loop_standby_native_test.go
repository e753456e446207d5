package daemon

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
)

// TestNativeStandbyOpensFirst: a flusher takes rules of a native table that translates. Its
// gate opens at the first evidence, before canaryd waits, dumps or writes, also if iptables'
// tables are healed first. It is shut once the table is proved, and the record says so.
func TestNativeStandbyOpensFirst(t *testing.T) {
	for name, flush := range map[string]func(*rig, *fakeNative){
		"flush ruleset": func(_ *rig, k *fakeNative) { k.flushRuleset() },
		"flush table":   func(_ *rig, k *fakeNative) { k.flushTable(proxyTable) },
		"everything": func(r *rig, k *fakeNative) {
			must(r.t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
			k.flushRuleset()
		},
		"iptables' rules, and 10 ms later everything": func(r *rig, k *fakeNative) {
			must(r.t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
			time.Sleep(10 * time.Millisecond)
			k.flushRuleset()
		},
		"Docker's table, and 10 ms later everything": func(_ *rig, k *fakeNative) {
			k.flushTable(dockerTable)
			time.Sleep(10 * time.Millisecond)
			k.flushRuleset()
		},
	} {
		bubble(t, name, func(t *testing.T) {
			r, k, s := withNativeStandby(t, nil)
			r.wantNativeStandby(s, api.StandbyArmed)
			for range 2 {
				began, before := time.Now(), k.count()
				flush(r, k)
				flushed := time.Now()
				r.settled()
				r.wantReady()
				r.wantNativeStandby(s, api.StandbyArmed)
				opened := s.named("open ip kube-proxy", began)
				if len(opened) != 1 {
					t.Fatalf("opened %d times", len(opened))
				}
				if took, writes := opened[0].at.Sub(flushed), opened[0].heals-before.heals; took < 0 || took > time.Millisecond || writes > 0 {
					t.Errorf("it was opened after %v and %d writes", took, writes)
				}
				record := r.d.Status().Flushes[0]
				want := &api.StandbyUse{Families: []rules.Family{}, Tables: []string{"ip kube-proxy"}, AfterSeconds: record.Standby.AfterSeconds, OpenSeconds: record.Standby.OpenSeconds}
				if diff := cmp.Diff(want, record.Standby); diff != "" || want.OpenSeconds < 0.02 {
					t.Errorf("the record says of the standby (-want +got):\n%s", diff)
				}
				if calls := s.named("", began); len(calls) != 2 && !strings.Contains(name, "everything") {
					t.Errorf("want one opening and one shutting: %+v", calls)
				}
				k.wantNative(t, natTable(proxyTable, "a", "b"))
			}
			r.wantLog("The standby translates until the rules are back")
		})
	}
}

// TestNativeStandbyStaysShut: the gate stays shut for a possible owner's deed, in observe mode,
// in a pause, and while the tables are unknown. A table that does not translate has no gate.
func TestNativeStandbyStaysShut(t *testing.T) {
	shut := func(t *testing.T, s *fakeNativeStandby, since time.Time) {
		t.Helper()
		for _, what := range []string{"open ip kube-proxy", "open ip docker-bridges"} {
			if opened := s.named(what, since); len(opened) > 0 {
				t.Errorf("%s: %+v", what, opened)
			}
		}
	}
	for name, do := range map[string]func(*fakeNative){
		"deleted alone": func(k *fakeNative) { k.deleteTable(proxyTable) },
		"deleted alone, and another table is lost": func(k *fakeNative) {
			k.deleteTable(proxyTable)
			time.Sleep(2 * time.Second)
			k.with(func() { k.refuses[dockerTable] = true })
			k.again(tableOf(dockerTable, "c")) // with its own handle
			k.flushTable(dockerTable)
		},
		"dormant":        func(k *fakeNative) { k.dormant(proxyTable, true) },
		"made again":     func(k *fakeNative) { k.again(natTable(proxyTable, "z")) },
		"synced":         func(k *fakeNative) { k.sync(natTable(proxyTable, "a", "z")) },
		"another table":  func(k *fakeNative) { k.flushTable(dockerTable) },
		"not known":      func(k *fakeNative) { k.breakDown(errNativeBroken); k.flushRuleset() },
		"commits missed": func(k *fakeNative) { k.miss() },
	} {
		bubble(t, name, func(t *testing.T) {
			_, k, s := withNativeStandby(t, nil)
			since := time.Now()
			do(k)
			time.Sleep(20 * time.Second)
			synctest.Wait()
			shut(t, s, since)
			if s.isOpen(proxyTable) {
				t.Error("it is open")
			}
		})
	}
	bubble(t, "observe", func(t *testing.T) {
		r, k, s := withNativeStandby(t, func(s *setup) { s.mode = api.Observe })
		k.flushRuleset()
		r.after(time.Minute)
		if calls := s.named("", time.Time{}); len(calls) > 0 {
			t.Errorf("asked for %+v", calls)
		}
	})
	bubble(t, "pause", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		r.pause(time.Minute)
		paused := time.Now()
		k.flushRuleset()
		r.after(30 * time.Second)
		r.wantNativeStandby(s, api.StandbyArmed)
		shut(t, s, paused)
		r.after(40 * time.Second)
		r.wantReady()
		if opened := s.named("open ip kube-proxy", paused); len(opened) != 1 || opened[0].at.Sub(paused) < time.Minute {
			t.Errorf("opened: %+v, want when the pause ended", opened)
		}
		r.wantNativeStandby(s, api.StandbyArmed)
	})
}

// TestNativeStandbyShuts: the kernel refuses the replay, and the gate is open. A pause, the
// owner's write, a cleanup, and 30 s shut it for good; the next loss opens it again.
func TestNativeStandbyShuts(t *testing.T) {
	lost := func(t *testing.T) (*rig, *fakeNative, *fakeNativeStandby) {
		r, k, s := withNativeStandby(t, nil)
		k.with(func() { k.refuses[proxyTable] = true })
		k.flushRuleset()
		r.after(100 * time.Millisecond)
		r.wantNativeStandby(s, api.StandbyOpen)
		return r, k, s
	}
	bubble(t, "pause", func(t *testing.T) {
		r, _, s := lost(t)
		r.pause(time.Hour)
		r.after(0)
		r.wantNativeStandby(s, api.StandbyArmed)
	})
	bubble(t, "owner", func(t *testing.T) {
		r, k, s := lost(t)
		k.again(natTable(proxyTable, "z"))
		r.after(5 * time.Second)
		r.wantReady()
		r.wantNativeStandby(s, api.StandbyArmed)
		if diff := native.Diff(natTable(proxyTable, "z"), s.holds(proxyTable)); len(diff) > 0 {
			t.Errorf("the copy is not what the owner wrote: %v", diff)
		}
	})
	bubble(t, "cleanup", func(t *testing.T) {
		r, _, s := lost(t)
		moved := r.moved(func() {
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
			r.after(time.Minute)
		}, "standby_open")
		if len(moved) > 0 {
			t.Errorf("the metrics say of iptables' tables how long it was open: %v", moved)
		}
		if s.isOpen(proxyTable) || s.holds(proxyTable) != nil {
			t.Error("the copy is still there")
		}
	})
	bubble(t, "limit", func(t *testing.T) {
		r, k, s := lost(t)
		opened := s.named("open ip kube-proxy", time.Time{})[0].at
		r.after(time.Minute)
		if shut := s.named("shut ip kube-proxy", opened); s.isOpen(proxyTable) || len(shut) != 1 || shut[0].at.Sub(opened) != copies.Most {
			t.Errorf("shut: %+v, want once after %s", shut, copies.Most)
		}
		r.wantLog("The standby stopped translating while rules are missing")
		again := time.Now()
		r.after(time.Minute)
		if opened := s.named("open ip kube-proxy", again); len(opened) > 0 {
			t.Errorf("opened again for the same loss: %+v", opened)
		}
		k.with(func() { k.refuses[proxyTable] = false })
		r.after(5 * time.Minute)
		r.wantReady()
		next := time.Now()
		k.flushRuleset()
		r.settled()
		if len(s.named("open ip kube-proxy", next)) == 0 {
			t.Error("not opened for the next loss")
		}
		r.wantNativeStandby(s, api.StandbyArmed)
	})
	bubble(t, "a table that had to go", func(t *testing.T) {
		r, k, s := lost(t)
		broken := errors.New("the kernel has no memory")
		s.set(func(s *fakeNativeStandby) { s.shutErr, s.followErr = broken, broken })
		k.with(func() { k.refuses[proxyTable] = false })
		r.after(10 * time.Second)
		r.wantReady()
		r.wantNativeStandby(s, api.StandbyUnavailable)
		s.set(func(s *fakeNativeStandby) { s.shutErr, s.followErr = nil, nil })
		r.after(pace.MakeAgain)
		r.wantNativeStandby(s, api.StandbyArmed)
	})
}

// TestNativeStandbyThatFailsDelaysNothing: the copy cannot be made, or its gate cannot be
// opened or shut. The table is back as fast as without a standby.
func TestNativeStandbyThatFailsDelaysNothing(t *testing.T) {
	broken := errors.New("the kernel has no memory")
	for name, ill := range map[string]func(*fakeNativeStandby){
		"none":   func(*fakeNativeStandby) {},
		"follow": func(s *fakeNativeStandby) { s.followErr = broken },
		"open":   func(s *fakeNativeStandby) { s.gateErr = broken },
		"shut":   func(s *fakeNativeStandby) { s.shutErr = broken },
	} {
		bubble(t, name, func(t *testing.T) {
			r, k, s := withNativeStandby(t, nil)
			s.set(ill)
			k.sync(natTable(proxyTable, "a", "b", "x")) // something to follow
			r.after(5 * time.Second)
			for range 3 {
				k.flushRuleset()
				r.settled()
				r.wantReady()
				if record := r.d.Status().Flushes[0]; record.AbsentSeconds < 0.02 || record.AbsentSeconds > 0.022 {
					t.Errorf("without the table for %v s, want the 20 ms of settling", record.AbsentSeconds)
				}
				k.wantNative(t, natTable(proxyTable, "a", "b", "x"))
			}
		})
	}
}

// TestNativeStandbyFollows: the copy follows the learned table, once a second at most, and less
// often if that takes long. The opening includes the latest learned changes, and nothing of a
// flushed table.
func TestNativeStandbyFollows(t *testing.T) {
	bubble(t, "changes", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		quiet := time.Now()
		r.after(10 * time.Minute)
		if calls := s.named("", quiet); len(calls) > 0 {
			t.Errorf("in a quiet time %d calls, the first %+v", len(calls), calls[0])
		}
		follow := func(takes time.Duration) int {
			s.set(func(s *fakeNativeStandby) { s.takes = takes })
			busy := time.Now()
			for n := range 60 {
				k.sync(natTable(proxyTable, "a", "b", time.Duration(n).String()))
				r.after(500 * time.Millisecond)
			}
			return len(s.named("follow ip kube-proxy", busy))
		}
		if n := follow(0); n < 10 || n > 31 {
			t.Errorf("written %d times in 30 s, want about once a second", n)
		}
		if n := follow(200 * time.Millisecond); n < 2 || n > 4 {
			t.Errorf("written %d times in 30 s where that takes 0.2 s, want for 2 %% of the time", n)
		}
		r.after(time.Minute)
		k.sync(natTable(proxyTable, "last"))
		r.after(3 * time.Second)
		k.sync(natTable(proxyTable, "very last"))
		r.after(900 * time.Millisecond)
		k.flushRuleset()
		r.settled()
		if diff := native.Diff(natTable(proxyTable, "very last"), s.holds(proxyTable)); len(diff) > 0 {
			t.Errorf("what was opened lacks the last change: %v", diff)
		}
	})
	bubble(t, "losses", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		k.with(func() { k.refuses[proxyTable] = true })
		flushed := time.Now()
		k.flushRuleset()
		r.after(5 * time.Minute)
		if calls := s.named("follow ip kube-proxy", flushed); len(calls) > 0 || s.holds(proxyTable) == nil {
			t.Errorf("followed while the table was missing: %+v", calls)
		}
	})
	bubble(t, "gone", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		k.deleteTable(proxyTable)
		r.settled()
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.after(5 * time.Second)
		if s.holds(proxyTable) != nil {
			t.Error("there is a copy of a table that its owner has deleted")
		}
		k.again(natTable(proxyTable, "new"))
		r.after(5 * time.Second)
		r.wantNativeStandby(s, api.StandbyArmed)
	})
}

// TestNativeStandbyWhereItIsNeeded: there is no copy of a table that does not translate. With
// auto only a large table has one.
func TestNativeStandbyWhereItIsNeeded(t *testing.T) {
	bubble(t, "no nat", func(t *testing.T) {
		r, _, s := withNativeStandby(t, nil)
		if s.holds(dockerTable) != nil {
			t.Error("there is a copy of a table that does not translate")
		}
		shown := r.metrics("native_standby")
		if shown["native_standby{family=ip,state=idle,table=ip docker-bridges}"] != 1 {
			t.Errorf("the metrics have %v", shown)
		}
	})
	bubble(t, "auto", func(t *testing.T) {
		r, k, s := withNativeStandby(t, func(s *setup) { s.standbyAuto = true })
		r.wantNativeStandby(s, api.StandbyIdle)
		large := natTable(proxyTable, "a")
		large.Sets = make([]native.Set, nativeStandbyFrom)
		k.sync(large)
		r.after(5 * time.Second)
		r.wantNativeStandby(s, api.StandbyArmed)
		half := natTable(proxyTable, "a")
		half.Sets = large.Sets[:nativeStandbyFrom/2]
		k.sync(half)
		r.after(5 * time.Second)
		r.wantNativeStandby(s, api.StandbyArmed)
		k.sync(natTable(proxyTable, "a"))
		r.after(5 * time.Second)
		r.wantNativeStandby(s, api.StandbyIdle)
		if s.holds(proxyTable) != nil {
			t.Error("there is still a copy")
		}
	})
	bubble(t, "its table is gone", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		s.set(func(s *fakeNativeStandby) { s.gateErr = standby.ErrNotBuilt })
		k.with(func() { k.refuses[proxyTable] = true })
		k.flushRuleset()
		r.settled()
		r.wantNativeStandby(s, api.StandbyUnavailable)
		s.set(func(s *fakeNativeStandby) { s.gateErr = nil })
		k.with(func() { k.refuses[proxyTable] = false })
		r.after(2 * pace.MakeAgain)
		r.wantNativeStandby(s, api.StandbyArmed)
	})
	bubble(t, "the kernel cannot", func(t *testing.T) {
		r, k, s := withNativeStandby(t, func(set *setup) {
			set.nativeStandby.followErr = errors.New("another process has a table of the standby's name")
		})
		r.wantNativeStandby(s, api.StandbyUnavailable)
		s.set(func(s *fakeNativeStandby) { s.followErr = nil })
		r.after(2 * pace.MakeAgain)
		r.wantNativeStandby(s, api.StandbyArmed)
		_ = k
	})
}

// TestStandbyOpensWhileNativeTablesAreWaitedFor: a flusher takes iptables' nat 10 ms after
// native tables. canaryd sees that before it has waited for the flusher's end or written
// anything.
func TestStandbyOpensWhileNativeTablesAreWaitedFor(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		k := newFakeNative(tableOf(dockerTable, "c"))
		r, s := withStandby(t, func(set *setup) { set.guarded = k })
		before := k.count()
		k.flushTable(dockerTable)
		time.Sleep(10 * time.Millisecond)
		r.flushNat()
		flushed := time.Now()
		k.flushTable(dockerTable) // moves the genid, as on a node
		r.settled()
		r.wantReady()
		opened := s.named("open ipv4", time.Time{})
		if len(opened) == 0 || opened[0].at.Sub(flushed) > time.Millisecond {
			t.Errorf("flushed at %v, and opened: %+v", flushed, opened)
		}
		if k.count().heals == before.heals {
			t.Error("the native table was not put back")
		}
		r.wantStandby(s, api.StandbyArmed)
	})
}

// TestNoNativeStandby: the status has the reason for a missing standby if --standby requests
// one.
func TestNoNativeStandby(t *testing.T) {
	for reason, want := range map[string]*api.FamilyStandby{
		"":                            nil,
		"the kernel has no nf_tables": {State: api.StandbyUnavailable, Reason: "the kernel has no nf_tables"},
	} {
		bubble(t, reason, func(t *testing.T) {
			r := run(t, loadedFake(t, "legacy"), setup{guarded: newFakeNative(natTable(proxyTable, "a")), nativeStandbyOff: reason})
			r.after(5 * time.Second)
			if diff := cmp.Diff(want, r.d.Status().Native[0].Standby); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
