package daemon

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeNode runs a daemon that guards native tables, in virtual time.
func nativeNode(t *testing.T, s setup, body func(t *testing.T, r *rig, k *fakeNative)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		k := s.guarded
		if k == nil {
			k = newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
		}
		s.guarded = k
		r := start(t, iptables.NFT, s)
		if k.count().witness == "" {
			t.Fatal("no witness was planted")
		}
		body(t, r, k)
	})
}

// wantOneFlush fails unless there is one record, of that kind and outcome.
func (r *rig) wantOneFlush(kind string, outcome api.Outcome) api.Flush {
	r.t.Helper()
	list := r.d.Status().Flushes
	if len(list) != 1 || string(list[0].Kind) != kind || list[0].Outcome != outcome {
		r.t.Fatalf("flush records %+v, want one of %s: %s", list, kind, outcome)
	}
	return list[0]
}

// TestNativeFlushes: a flusher takes native tables. They are back at once, with a proved record
// that names the process.
func TestNativeFlushes(t *testing.T) {
	for _, test := range []struct {
		name, kind string
		do         func(k *fakeNative)
		tables     int
	}{
		{"flush ruleset", "table_deleted", (*fakeNative).flushRuleset, 2},
		{"flush table", "emptied", func(k *fakeNative) { k.flushTable(proxyTable) }, 1},
		{"flush ruleset, commits missed", "table_deleted", func(k *fakeNative) { k.missing(k.flushRuleset) }, 2},
		{"flush table, commits missed", "emptied", func(k *fakeNative) { k.missing(func() { k.flushTable(proxyTable) }) }, 1},
		{"two flushers", "table_deleted", func(k *fakeNative) { k.flushTable(proxyTable); k.flushRuleset() }, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.settled()
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				k.wantNative(t, tableOf(dockerTable, "c"))
				r.wantReady()
				f := r.wantOneFlush(test.kind, reload.Proved)
				missed := strings.Contains(test.name, "missed")
				if len(f.Native) != test.tables || (f.Culprit.PID != 4242) != missed || f.Lost.Rules == 0 {
					t.Errorf("the record says %+v", f)
				}
				r.wantLog(`"Rules are being flushed" flush="` + f.ID + `" tables="`)
				if absent := api.Seconds(f.AbsentSeconds); absent < 20*time.Millisecond || absent > 50*time.Millisecond {
					t.Errorf("absent for %s, want the 20 ms of settling and little more", absent)
				}
				if k.count().heals != 1 || k.count().witness == "" {
					t.Errorf("%d replays, the witness is %q", k.count().heals, k.count().witness)
				}
				test.do(k) // the restored tables are guarded as before
				r.settled()
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				r.wantReady()
			})
		})
	}
}

// TestNativeOwners: canaryd learns an owner's writes, reports no flush for them, and restores
// them after a flush.
func TestNativeOwners(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.sync(tableOf(proxyTable, "a", "b", "new"))
		k.again(tableOf(dockerTable, "d"))
		r.after(500 * time.Millisecond)
		r.wantReady()
		if n := len(r.d.Status().Flushes); n != 0 || k.count().heals != 0 {
			t.Fatalf("%d flushes and %d replays for what owners did", n, k.count().heals)
		}
		k.again(tableOf(proxyTable.Family.Table("later"), "x"))
		r.settled()
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b", "new"))
		k.wantNative(t, tableOf(dockerTable, "d"))
		k.wantNative(t, tableOf(proxyTable.Family.Table("later"), "x"))
		r.wantOneFlush("table_deleted", reload.Proved)

		k.flushRuleset() // and its owner is faster
		k.again(tableOf(dockerTable, "e"))
		r.settled()
		k.wantNative(t, tableOf(dockerTable, "e"))
		k.wantNative(t, tableOf(proxyTable, "a", "b", "new"))
		r.wantReady()
	})
}

// TestNativeDeletedAlone: a process deletes one table. canaryd reports and does not restore it,
// also after missed commits and a flush of the ruleset. The loss ends when its owner makes the
// table again, or an operator accepts it.
func TestNativeDeletedAlone(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.deleteTable(proxyTable)
		r.settled()
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		f := r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision)
		if f.Culprit.PID != 4242 {
			t.Errorf("the culprit is %+v", f.Culprit)
		}
		k.missing(k.flushRuleset)
		r.settled()
		k.wantNative(t, tableOf(dockerTable, "c"))
		if k.standing(proxyTable) != nil {
			t.Error("a table that was deleted alone was put back")
		}
		k.again(tableOf(proxyTable, "z"))
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "z"))
		r.wantReady()

		k.deleteTable(proxyTable)
		r.settled()
		if _, err := r.d.Dismiss(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.settled()
		r.wantReady()
		if got := r.d.Status().Flushes[0].Outcome; got != api.Dismissed {
			t.Errorf("the outcome is %s", got)
		}
	})
}

// TestNativeDormant: the kernel attaches nothing of a dormant table. That is an outage, and is
// reported.
func TestNativeDormant(t *testing.T) {
	nativeNode(t, setup{journal: t.TempDir()}, func(t *testing.T, r *rig, k *fakeNative) {
		k.dormant(proxyTable, true)
		r.settled()
		r.wantNotReady("table ip kube-proxy is disabled")
		want := []api.TableDiff{{Family: proxyTable.Family, Table: proxyTable.Name, Native: true, Lines: []string{"-table ip kube-proxy", "+table ip kube-proxy flags dormant"}}}
		if d := cmp.Diff(want, r.full("1").Diff); d != "" {
			t.Errorf("what it lost (-want +got):\n%s", d)
		}
		k.dormant(proxyTable, false)
		r.settled()
		r.wantReady()
		r.wantOneFlush("disabled", reload.Skipped)
		if k.count().heals != 0 {
			t.Error("canaryd wrote")
		}
	})
}

// TestNativeLostOnceMore: a table that waits for a decision is lost in another way. Each loss has
// a record, and only the last one waits.
func TestNativeLostOnceMore(t *testing.T) {
	nativeNode(t, setup{journal: t.TempDir()}, func(t *testing.T, r *rig, k *fakeNative) {
		k.dormant(proxyTable, true)
		r.settled()
		k.deleteTable(proxyTable)
		r.settled()
		var got []string
		for n, f := range r.d.Status().Flushes {
			got = append(got, fmt.Sprintf("%s: %s", f.Kind, f.Outcome))
			if kept := r.full(fmt.Sprint(n + 1)).Flush; kept.Outcome != f.Outcome || kept.Detail != f.Detail {
				t.Errorf("on disk the record is %s (%s), and not %s (%s)", kept.Outcome, kept.Detail, f.Outcome, f.Detail)
			}
		}
		want := []string{"deleted_by_owner_or_unknown: waiting: decision", "disabled: interrupted"}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("records (-want +got):\n%s", d)
		}
		k.again(tableOf(proxyTable, "z"))
		r.settled()
		r.wantReady()
		for _, f := range r.d.Status().Flushes {
			if f.Open() || f.Stage(time.Now()) != api.Over {
				t.Errorf("the record %s: %s is open", f.Kind, f.Outcome)
			}
		}
	})
}

// TestNativeStaleAndRefused: a replay that meets another writer is planned again. A refused
// table does not stop the others, and is tried again at growing distances.
func TestNativeStaleAndRefused(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.stale = 3 })
		k.flushRuleset()
		r.settled()
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Proved)

		k.with(func() { k.refuses[proxyTable] = true })
		k.flushRuleset()
		r.after(10 * time.Second)
		k.wantNative(t, tableOf(dockerTable, "c"))
		r.wantNotReady("ip kube-proxy is table_deleted")
		if f := r.d.Status().Flushes[0]; f.Outcome != reload.Failed || !strings.Contains(f.Detail, "ipv4 kube-proxy") {
			t.Errorf("the record says %+v", f)
		}
		if n := strings.Count(r.log.String(), "Rules are still missing"); n == 0 || n > 3 {
			t.Errorf("the log says %d times that rules are missing", n)
		}
		k.with(func() { delete(k.refuses, proxyTable) })
		r.after(30 * time.Second)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
	})
}

// TestNativeOneByOne: canaryd writes each table by itself, and an owner writes between two of
// them. Its rules are newer than the read, and stay.
func TestNativeOneByOne(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		newer := tableOf(dockerTable, "newer")
		k.with(func() { k.alone, k.between = true, func() { k.sync(newer) } })
		k.flushTable(proxyTable)
		k.flushTable(dockerTable)
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, newer)
		r.wantReady()
	})
}

// TestNativeObserved: observe mode writes witnesses only, and the owner ends the loss.
func TestNativeObserved(t *testing.T) {
	nativeNode(t, setup{mode: api.Observe}, func(t *testing.T, r *rig, k *fakeNative) {
		k.flushRuleset()
		r.settled()
		r.wantNotReady("ip kube-proxy is table_deleted")
		if k.count().heals != 0 || k.count().witness == "" {
			t.Errorf("%d replays, the witness is %q", k.count().heals, k.count().witness)
		}
		r.wantOneFlush("table_deleted", api.WaitingObserve)
		k.again(tableOf(proxyTable, "n"))
		k.again(tableOf(dockerTable, "m"))
		r.settled()
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Skipped)
	})
}

// TestNativePaused: a pause delays the replay until its end.
func TestNativePaused(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60})
		must(t, err)
		k.flushRuleset()
		r.settled()
		r.wantNotReady("ip kube-proxy is table_deleted")
		r.wantOneFlush("table_deleted", api.WaitingPaused)
		if k.count().heals != 0 {
			t.Error("canaryd wrote in a pause")
		}
		k.again(tableOf(dockerTable)) // a part of the loss
		k.flushTable(dockerTable)
		reads := k.count().captures
		r.after(10 * time.Second)
		if n := k.count().captures - reads; n > 10 {
			t.Errorf("%d reads in a pause", n)
		}
		r.after(time.Minute)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Proved)
	})
}

// TestNativeWar: a flusher does not stop, and takes the tables between replays or before each
// proof. Replays are limited, and the log says so.
func TestNativeWar(t *testing.T) {
	for name, strikes := range map[string]func(r *rig, k *fakeNative){
		"between replays": func(r *rig, k *fakeNative) {
			for range 600 {
				k.flushRuleset()
				r.after(100 * time.Millisecond)
			}
		},
		"before the proof": func(r *rig, k *fakeNative) {
			var again func()
			again = func() {
				k.flushRuleset()
				k.with(func() { k.between = again })
			}
			again()
			r.after(time.Minute)
			k.with(func() { k.between = nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				strikes(r, k)
				if n := k.count().heals; n < 15 || n > 60 {
					t.Errorf("%d replays in a minute of flushes", n)
				}
				if !r.d.Status().Contended || r.logged("keeps undoing the replays") != 1 {
					t.Errorf("contended: %t, said %d times", r.d.Status().Contended, r.logged("keeps undoing"))
				}
				r.after(20 * time.Second)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				r.wantReady()
				r.after(calmFor)
				if r.d.Status().Contended || r.logged("stay in place again") != 1 {
					t.Errorf("contended: %t, the end said %d times", r.d.Status().Contended, r.logged("stay in place again"))
				}
			})
		})
	}
}

// TestNativeUnread: while reads fail, the tables are unknown and not healthy, and canaryd
// writes nothing.
func TestNativeUnread(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.breakDown(errNativeBroken)
		r.after(3 * time.Second)
		r.wantNotReady("native tables are unknown")
		k.flushRuleset()
		r.after(3 * time.Second)
		k.breakDown(nil)
		r.after(3 * time.Second)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
	})
}

// TestNativeRestarts: tables are lost while no canaryd runs. canaryd restores them if the
// stored state is young enough, and otherwise reports them. A table that was deleted alone
// stays deleted.
func TestNativeRestarts(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		down time.Duration
		want string // the reason of not ready
		back bool
	}{
		{"flush ruleset", (*fakeNative).flushRuleset, time.Minute, "", true},
		{"flush table", func(k *fakeNative) { k.flushTable(proxyTable) }, time.Minute, "", true},
		{"too long ago", (*fakeNative).flushRuleset, time.Hour, "ip kube-proxy is table_deleted", false},
		{"deleted alone", func(k *fakeNative) { k.deleteTable(proxyTable) }, time.Minute, "ip kube-proxy is deleted_by_owner_or_unknown", false},
		{"owner's own", func(k *fakeNative) { k.again(tableOf(proxyTable, "a", "b")) }, time.Hour, "", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{})
			nativeNode(t, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
				r.stop()
				test.do(k)
				time.Sleep(test.down)
				k.Hear(0)
				next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store})
				next.settled()
				if test.want != "" {
					next.wantNotReady(test.want)
				} else {
					next.wantReady()
				}
				if got := k.standing(proxyTable) != nil; got != test.back {
					t.Errorf("the table stands: %t", got)
				}
				if test.back {
					k.wantNative(t, tableOf(proxyTable, "a", "b"))
				}
				for _, f := range next.d.Status().Flushes {
					if f.LastInForce.IsZero() {
						t.Errorf("the record says %+v, want a bound", f)
					}
				}
			})
		})
	}
}

// TestNativeConfirmedAfterARestart: nothing changes after a restart, and canaryd still keeps
// storing that the tables are in force. So a kill an hour later leaves no unknown hour.
func TestNativeConfirmedAfterARestart(t *testing.T) {
	store := nativestore.New(t.TempDir(), nativestore.Identity{})
	nativeNode(t, setup{nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(5 * time.Second)
		r.stop()
		k.Hear(0)
		r = run(t, r.fake, setup{guarded: k, nativeStore: store})
		r.after(time.Hour)
		stored, err := store.Load()
		must(t, err)
		if ago := bubbleUptime() - stored.Confirmed; ago > 2*confirmEvery {
			t.Errorf("on disk the tables were in force %s ago", ago)
		}
	})
}

// TestNativeBounds: canaryd skips tables with an owner in the kernel, and reports the number of
// tables beyond its limit.
func TestNativeBounds(t *testing.T) {
	k := newFakeNative(tableOf(proxyTable, "a", "b"))
	owned := proxyTable.Family.Table("owned")
	k.put(tableOf(owned, "o"))
	k.owners[owned] = 77
	for n := range 70 {
		k.put(tableOf(dockerTable.Family.Table("many"+strings.Repeat("x", n)), "m"))
	}
	nativeNode(t, setup{guarded: k}, func(t *testing.T, r *rig, k *fakeNative) {
		s := r.d.Status()
		if len(s.Native) != 65 || s.NativeOverLimit != 7 {
			t.Errorf("%d tables, and %d too many", len(s.Native), s.NativeOverLimit)
		}
		r.wantLog("Not all native tables are guarded")
		k.flushRuleset()
		r.settled()
		r.wantReady()
		if n := len(r.d.Status().Native); n != 65 {
			t.Errorf("%d tables", n)
		}

		k.with(func() { k.owners[proxyTable] = 78 }) // it makes the table again as the kernel's owner
		k.again(tableOf(proxyTable, "o"))
		reads := k.count().captures
		r.after(10 * time.Second)
		r.wantReady()
		if n := k.count().captures - reads; n > 5 {
			t.Errorf("%d reads", n)
		}
		if s := r.statusJSON()["native"]; !strings.Contains(fmt.Sprint(s), "immune:true rules:0 table:ip kube-proxy") {
			t.Errorf("the status has %v", s)
		}
	})
}

// TestNativeNamesBeforeGlobs: a table that --protect names has its place, although globs match
// more tables, and earlier ones. In a glob a slash is an ordinary character.
func TestNativeNamesBeforeGlobs(t *testing.T) {
	late := tableid.Inet.Table("z/late")
	k := newFakeNative()
	for n := range 70 {
		k.put(tableOf(dockerTable.Family.Table(fmt.Sprintf("a/%d", n)), "m"))
	}
	nativeNode(t, setup{guarded: k, named: "nft:inet:z/late"}, func(t *testing.T, r *rig, k *fakeNative) {
		if s := r.d.Status(); len(s.Native) != protect.MaxNative-1 || s.NativeOverLimit != 7 {
			t.Errorf("%d tables, and %d too many", len(s.Native), s.NativeOverLimit)
		}
		k.again(tableOf(late, "a", "b"))
		r.settled()
		k.flushRuleset()
		r.settled()
		r.wantReady()
		k.wantNative(t, tableOf(late, "a", "b"))
		if n := len(r.d.Status().Native); n != protect.MaxNative {
			t.Errorf("%d tables", n)
		}
	})
}

// TestNativeQuiet: canaryd reads no native tables while nothing changes.
func TestNativeQuiet(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		reads := k.count().captures
		r.after(10 * time.Minute)
		if n := k.count().captures - reads; n != 0 {
			t.Errorf("%d reads in a quiet time", n)
		}
	})
}

// TestNativeSeveralWait: losses that wait for a decision keep their order in the status, after
// a newer flush. A dismissal names them.
func TestNativeSeveralWait(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.deleteTable(proxyTable)
		r.settled()
		k.deleteTable(dockerTable)
		r.settled()
		before := r.d.Status()
		if len(before.Flushes) != 2 || !before.Flushes[0].Time.After(before.Flushes[1].Time) {
			t.Fatalf("flush records %+v, want two, the newest first", before.Flushes)
		}
		for range 30 {
			r.after(time.Second)
			if now := r.d.Status(); now.Differs(before) {
				t.Fatalf("the status has changed to %+v", now.Flushes)
			}
		}
		r.flushNat()
		r.settled()
		if last, _ := r.d.Status().LastFlush(); len(last.Native) != 0 {
			t.Errorf("the last flush is %+v", last)
		}
		reply, err := r.d.Dismiss(t.Context())
		must(t, err)
		if diff := cmp.Diff([]string{"ip docker-bridges", "ip kube-proxy"}, reply.Native); diff != "" {
			t.Errorf("dismissed (-want +got):\n%s", diff)
		}
	})
}
