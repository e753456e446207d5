package daemon

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// flushBoth runs "nft flush ruleset", which takes iptables' tables and native ones.
func (r *rig) flushBoth(k *fakeNative) {
	r.t.Helper()
	k.flushRuleset()
	must(r.t, r.fake.FlushRuleset())
}

// many returns a table with so many rules that it may not ride with iptables' tables.
func many(id tableid.TableID) *native.Table {
	return tableOf(id, strings.Split(strings.Repeat("x", rideMost), "")...)
}

// TestNativeRides: one flush takes tables of both realms, and has one record. One transaction
// restores them if it is short and the kernel takes it; otherwise each realm has its own. A bad
// native table costs iptables no rule.
func TestNativeRides(t *testing.T) {
	type came struct {
		Rode, Writes, Records int // writes of native tables: with iptables', and all
		Proved                bool
	}
	joined, apart := came{1, 1, 1, true}, came{0, 1, 1, true}
	for _, test := range []struct {
		name   string
		tables []*native.Table
		before func(r *rig, k *fakeNative)
		do     func(r *rig, k *fakeNative)
		want   came
		within time.Duration // limit for iptables' rules; 0: five times --settle
	}{
		{name: "both lost", want: joined},
		{name: "three times a process commits between the read and the write", before: func(_ *rig, k *fakeNative) {
			left := 3
			var again func()
			again = func() {
				if left--; left > 0 {
					k.boarding = again
				}
				k.again(tableOf(tableid.IPv6.Table("other"), "o"))
			}
			k.boarding = again
		}, want: joined},
		{name: "the kernel refuses what rides", before: func(_ *rig, k *fakeNative) { k.unrideable = true }, want: apart},
		{name: "the kernel refuses one table", before: func(_ *rig, k *fakeNative) { k.refuses[proxyTable] = true }, want: came{0, 1, 1, false}},
		{name: "the table is known to be refused", tables: []*native.Table{tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "unreplayable")}, want: apart},
		{name: "a long one", tables: []*native.Table{many(proxyTable)}, want: apart},
		{name: "its owner is faster", do: func(r *rig, k *fakeNative) {
			r.flushBoth(k)
			k.again(tableOf(proxyTable, "a", "b"))
			k.again(tableOf(dockerTable, "c"))
		}, want: came{0, 0, 1, true}},
		{name: "a part was lost", do: func(r *rig, k *fakeNative) {
			k.flushTable(proxyTable)
			must(r.t, r.fake.FlushRuleset())
		}, want: apart},
		{name: "commits were missed", do: func(r *rig, k *fakeNative) { k.missing(func() { r.flushBoth(k) }) }, want: apart},
		{name: "iptables' rules alone", do: func(r *rig, _ *fakeNative) { must(r.t, r.fake.FlushRuleset()) }, want: came{0, 0, 1, true}},
		{name: "flushed once more, right after the write", before: func(r *rig, k *fakeNative) {
			k.committed = func() { r.flushBoth(k) }
		}, want: came{1, 2, 1, true}, within: 500 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := setup{}
			if test.tables != nil {
				s.guarded = newFakeNative(test.tables...)
			}
			s.rehearse = func(table *native.Table) error {
				if table.ID == dockerTable && slices.ContainsFunc(table.Chains, func(c native.Chain) bool {
					return slices.ContainsFunc(c.Rules, func(r native.Rule) bool { return strings.Contains(string(r.Attrs), "unreplayable") })
				}) {
					return &native.UnreplayableError{Table: table.ID, Why: errNativeBroken}
				}
				return nil
			}
			nativeNode(t, s, func(t *testing.T, r *rig, k *fakeNative) {
				tables := r.tables()
				var want []*native.Table
				k.with(func() {
					for _, table := range k.tables {
						want = append(want, table)
					}
				})
				if test.before != nil {
					k.with(func() { test.before(r, k) })
				}
				if test.do == nil {
					r.flushBoth(k)
				} else {
					test.do(r, k)
				}
				r.after(cmp.Or(test.within, 100*time.Millisecond))
				r.wantTables(tables, nil) // whatever happens to native tables
				r.settled()
				got := came{Records: len(r.d.Status().Flushes), Proved: r.d.Status().Ready() == nil}
				k.with(func() { got.Rode, got.Writes = k.rode, k.heals })
				if diff := gocmp.Diff(test.want, got); diff != "" {
					t.Errorf("(-want +got)\n%s", diff)
				}
				if test.want.Proved {
					for _, table := range want {
						k.wantNative(t, table)
					}
				}
			})
		})
	}
}

// TestNativeRideRecord: one record has the losses of both realms, and the flush counts once.
func TestNativeRideRecord(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.flushBoth(k)
		r.settled()
		f := r.wantOneFlush("table_deleted", reload.Proved)
		rulesLost := 0
		for _, l := range f.Lost.Tables {
			rulesLost += l.Rules
		}
		for _, l := range f.Native {
			rulesLost += l.Rules
		}
		if len(f.Native) != 2 || len(f.Lost.Tables) == 0 || f.Lost.Rules != rulesLost || f.Culprit.PID != 4242 || len(f.Native[0].By) != 1 {
			t.Errorf("the record says %+v", f)
		}
		if absent := api.Seconds(f.AbsentSeconds); absent < 20*time.Millisecond || absent > 25*time.Millisecond {
			t.Errorf("absent for %s, want the 20 ms of settling and little more", absent)
		}
		got := r.metrics("flush_events", "flushes_total", "replays_total")
		for metric, want := range map[string]float64{
			"flush_events_total": 1,
			"flushes_total{family=ip,kind=table_deleted,table=ip kube-proxy}": 1,
			"flushes_total{family=ipv4,kind=table_deleted,table=nat}":         1,
			"replays_total{family=ip,result=proved}":                          2,
		} {
			if got[metric] != want {
				t.Errorf("%s is %v, want %v of %v", metric, got[metric], want, got)
			}
		}
		if n := r.logged("Rules were lost"); n != 2 {
			t.Errorf("the log says %d times that rules were lost, want once for each realm", n)
		}
	})
}

// TestNativeRideIsHeldBack: in a pause and in observe mode nothing rides. After a pause the
// loss keeps its record.
func TestNativeRideIsHeldBack(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60})
		must(t, err)
		r.flushBoth(k)
		r.settled()
		r.wantNotReady("ip kube-proxy is table_deleted")
		if k.count().heals != 0 {
			t.Error("canaryd wrote in a pause")
		}
		r.after(time.Minute)
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Proved)
	})
	nativeNode(t, setup{mode: api.Observe}, func(t *testing.T, r *rig, k *fakeNative) {
		r.flushBoth(k)
		r.settled()
		if k.count().heals != 0 || r.fake.Genid() == 0 {
			t.Error("canaryd wrote in observe mode")
		}
	})
}

// TestNativeRideLeavesOthers: a table rides after a pause. The record of another table, which
// exists without its rules, stays open until canaryd restores these.
func TestNativeRideLeavesOthers(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		docker := k.standing(dockerTable)
		_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60})
		must(t, err)
		k.reload(tableOf(proxyTable))
		must(t, r.fake.FlushRuleset())
		r.settled()
		r.wantNotReady("ip kube-proxy is replaced")
		r.after(time.Minute)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, docker)
		r.wantReady()
		for _, f := range r.d.Status().Flushes {
			if f.Outcome != reload.Proved {
				t.Errorf("a record ended %s: %+v", f.Outcome, f)
			}
		}
	})
}

// TestNativeOwnerWritesAfterRide: an owner writes between a ride and its proof. It has the last
// word, and no rule counts as missing.
func TestNativeOwnerWritesAfterRide(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.committed = func() { k.sync(tableOf(proxyTable, "a", "newer")) }
		r.flushBoth(k)
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "newer"))
		r.wantReady()
		for _, f := range r.d.Status().Flushes {
			if f.Outcome != reload.Proved || f.Attempts > 1 {
				t.Errorf("a record ended %s after %d tries: %+v", f.Outcome, f.Attempts, f)
			}
		}
		if strings.Contains(r.log.String(), "Rules are still missing") {
			t.Error("the log says that rules are missing")
		}
	})
}

// TestNativeComesDuringALoss: an owner makes a table while another one waits for its replay.
// canaryd guards the new table from then on.
func TestNativeComesDuringALoss(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		later := tableOf(proxyTable.Family.Table("later"), "x")
		for _, flush := range []func(){k.flushRuleset, func() { r.flushBoth(k) }} {
			flush()
			k.again(later)
			r.settled()
			flush()
			r.settled()
			k.wantNative(t, later)
			r.wantReady()
			k.again(tableOf(later.ID)) // and is deleted again
			k.deleteTable(later.ID)
			r.settled()
			_, err := r.d.Dismiss(t.Context())
			must(t, err)
			r.settled()
		}
	})
}

// TestARecordBeginsWithItsFirstLoss: the times of a record count from the earliest loss of its
// flush, whichever kind of table was noticed first.
func TestARecordBeginsWithItsFirstLoss(t *testing.T) {
	began := time.Now()
	for name, test := range map[string]struct{ later, time, noticed, after float64 }{
		"the second loss began later":   {later: 1, noticed: 0.5, after: 0.25},
		"the second loss began earlier": {later: -1, time: -1, noticed: 1.5, after: 1.25},
	} {
		at := func(s float64) time.Time { return began.Add(api.Seconds(s)) }
		o := newAnswer(api.Flush{Time: began, NoticedSeconds: 0.5, Standby: (*api.StandbyUse)(nil).WithTable("ip kube-proxy", time.Second/4)}, at(0.5)).openRecord
		o.begin(api.Flush{Time: at(test.later), LastInForce: at(-2), Stalled: true})
		want := api.Flush{Time: at(test.time), NoticedSeconds: test.noticed, LastInForce: at(-2), Stalled: true,
			Standby: (*api.StandbyUse)(nil).WithTable("ip kube-proxy", api.Seconds(test.after))}
		if diff := gocmp.Diff(want, o.record); diff != "" {
			t.Errorf("%s: (-want +got):\n%s", name, diff)
		}
	}
}
