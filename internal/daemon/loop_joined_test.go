package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestARecordGoesOnOverARestart: canaryd restarts before it has answered a flush. The flush has
// one record, which the next run ends.
func TestARecordGoesOnOverARestart(t *testing.T) {
	for _, tt := range []struct {
		name string
		mode api.Mode
		wait func(r *rig) (over func()) // prevents the replay
	}{
		{"observed", api.Observe, func(*rig) func() { return func() {} }},
		{"paused", api.Heal, func(r *rig) func() {
			r.pause(time.Hour)
			return func() {}
		}},
		{"failed", api.Heal, func(r *rig) func() {
			r.fake.FailRestores(-1, iptables.ReasonMissingSet)
			return func() { r.fake.FailRestores(0, "") }
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, records := t.TempDir(), t.TempDir()
				first := start(t, backend, setup{store: openStore(t, dir, identity(backend)), journal: records, mode: tt.mode})
				before, left := first.tables(), leftBy(t, backend, "flush-nat")
				over := tt.wait(first)
				first.flushNat()
				first.after(10 * time.Second)
				if n := len(first.d.Status().Flushes); n != 1 {
					t.Fatalf("%d records before the restart", n)
				}
				was := first.d.Status().Flushes[0]
				first.stop()
				over()
				time.Sleep(30 * time.Second)

				r := run(t, first.fake, setup{store: openStore(t, dir, identity(backend)), journal: records})
				r.resume()
				r.after(2 * pace.LastTry)
				r.wantBack(before, left)
				list := r.d.Status().Flushes
				if len(list) != 1 {
					t.Fatalf("%d records, want one", len(list))
				}
				got := list[0]
				if got.Outcome != reload.Proved || got.AbsentSeconds < 40 || !got.AbsentAtMost {
					t.Errorf("the record is %+v, and was %+v", got, was)
				}
				later := cmpopts.IgnoreFields(api.Flush{}, "Outcome", "Detail", "Attempts", "AbsentSeconds", "AbsentAtMost", "LastInForce", "WrittenSeconds", "KernelSeconds")
				if diff := cmp.Diff(was, got, later); diff != "" {
					t.Errorf("the record before the restart and after it (-want +got):\n%s", diff)
				}
				if full := r.full(got.ID); len(full.Diff) == 0 {
					t.Errorf("the record has lost its rules: %s", full.NoDiff)
				}
				if m := r.metrics("flush_events", "rules_absent"); m["flush_events_total"] != 0 || m["rules_absent_seconds"] != 1 {
					t.Errorf("metrics %v: the run before has counted the flush, this one its end", m)
				}
			})
		})
	}
}

// TestARecordDoesNotGoOnInAnotherFlush: when the next run begins, the lost rules are back, or
// other tables are lost. The earlier record is closed, on disk too.
func TestARecordDoesNotGoOnInAnotherFlush(t *testing.T) {
	for _, tt := range []struct {
		name      string
		meanwhile func(r *rig, before map[rules.Family]rules.Ruleset)
		want      []api.Outcome // outcomes of the next run's records, the newest first
	}{
		{"its owner put it back", func(r *rig, before map[rules.Family]rules.Ruleset) {
			r.write(rules.Nat, sectionOf(before[rules.IPv4][rules.Nat])...)
		}, []api.Outcome{reload.Skipped}}, // canaryd finds its marks lost, and no rule
		{"another table is lost", func(r *rig, before map[rules.Family]rules.Ruleset) {
			r.write(rules.Nat, sectionOf(before[rules.IPv4][rules.Nat])...)
			must(r.t, r.fake.Flush(rules.IPv6, rules.Nat, ""))
		}, []api.Outcome{reload.Proved, api.Interrupted}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, records := t.TempDir(), t.TempDir()
				node := func(do func(setup) *rig) *rig {
					return do(setup{store: openStore(t, dir, identity(backend)), journal: records})
				}
				first := node(func(s setup) *rig { return start(t, backend, s) })
				before := first.tables()
				first.pause(time.Hour)
				first.flushNat()
				first.after(10 * time.Second)
				was := first.d.Status().Flushes[0]
				first.stop()
				tt.meanwhile(first, before)
				for range 2 { // the second run reads the files of the first
					r := node(func(s setup) *rig { return run(t, first.fake, s) })
					r.resume()
					r.after(2 * pace.LastTry)
					var got []api.Outcome
					for _, f := range r.d.Status().Flushes {
						got = append(got, f.Outcome)
					}
					if diff := cmp.Diff(tt.want, got); diff != "" {
						t.Errorf("outcomes (-want +got):\n%s", diff)
					}
					r.stop()
				}
				must(t, first.fake.Flush(rules.IPv4, rules.Nat, ""))
				r := node(func(s setup) *rig { return run(t, first.fake, s) })
				r.after(2 * pace.LastTry)
				if got := r.d.Status().Flushes[0]; got.ID == was.ID || got.Outcome != reload.Proved {
					t.Errorf("a later flush goes on in the closed record: %+v", got)
				}
			})
		})
	}
}

// TestANativeRecordGoesOnOverARestart is the same for native tables. A pause lasts over the
// restart, and the witness is planted again in it. A flush that was judged before stays a flush.
func TestANativeRecordGoesOnOverARestart(t *testing.T) {
	for _, mode := range []api.Mode{api.Observe, api.Heal} {
		for kind, flush := range map[string]func(*fakeNative){
			"emptied":       func(k *fakeNative) { k.flushTable(proxyTable) },
			"table_deleted": (*fakeNative).flushRuleset,
		} {
			t.Run(string(mode)+", "+kind, func(t *testing.T) {
				dir, natives, records := t.TempDir(), t.TempDir(), t.TempDir()
				node := func(mode api.Mode) setup {
					return setup{store: openStore(t, dir, identity(iptables.NFT)), nativeStore: nativestore.New(natives, nativestore.Identity{}), journal: records, mode: mode}
				}
				nativeNode(t, node(mode), func(t *testing.T, r *rig, k *fakeNative) {
					r.after(10 * time.Second)
					if mode == api.Heal {
						r.pause(time.Hour)
					}
					flush(k)
					r.after(10 * time.Second)
					was := r.d.Status().Flushes[0]
					r.stop()
					time.Sleep(30 * time.Second)

					s := node("")
					s.guarded = k
					n := run(t, r.fake, s)
					n.after(10 * time.Second)
					n.resume()
					n.after(2 * pace.LastTry)
					got := n.wantOneFlush(kind, reload.Proved)
					if got.ID != was.ID || got.AbsentSeconds < 30 || !got.AbsentAtMost || got.Lost.Rules != was.Lost.Rules || len(got.Native) != len(was.Native) {
						t.Errorf("the record is %+v, and was %+v", got, was)
					}
					k.wantNative(t, tableOf(proxyTable, "a", "b"))
					n.wantReady()
				})
			})
		}
	}
}

// TestNativePauseAfterMissedCommits: a flush whose commits are missed is judged by the witness. The
// verdict stays while a pause lasts, in which the witness is planted again.
func TestNativePauseAfterMissedCommits(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.pause(time.Minute)
		k.missing(k.flushRuleset)
		r.settled()
		if k.count().witness == "" {
			t.Error("no witness was planted in the pause")
		}
		r.after(2 * time.Minute)
		r.wantOneFlush("table_deleted", reload.Proved)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
	})
}
