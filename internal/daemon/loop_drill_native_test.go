package daemon

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var proxyTable6 = tableid.IPv6.Table("kube-proxy")

// A drillNode is a kind of node for stories of drills of native tables.
type drillNode struct {
	name     string
	iptables bool // it has iptables' rules, too
}

// onDrillNodes runs body on a node with native tables only, and on one with both kinds.
func onDrillNodes(t *testing.T, s func() setup, body func(t *testing.T, n drillNode, r *rig, k *fakeNative)) {
	for _, n := range []drillNode{{"native tables only", false}, {"both", true}} {
		t.Run(n.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := s()
				if s.guarded == nil {
					s.guarded = newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(proxyTable6, "e"), tableOf(dockerTable, "c"))
				}
				fake := iptablestest.NewFake(iptables.NFT)
				if n.iptables {
					fake = loadedFake(t, iptables.NFT)
				}
				body(t, n, startOn(t, fake, s), s.guarded)
			})
		})
	}
}

// usual is the setup of most stories.
func usual() setup { return setup{} }

// wantNoDrillLeft fails unless the node is ready, its owners' tables are in force, and nothing of a
// drill is left.
func (r *rig) wantNoDrillLeft(k *fakeNative) {
	r.t.Helper()
	r.wantReady()
	if n := k.drillTables(); n != 0 {
		r.t.Errorf("%d tables of a drill are left", n)
	}
	for _, row := range r.d.Status().Native {
		if strings.Contains(row.Table, native.DrillName) {
			r.t.Errorf("the status has a table of a drill: %+v", row)
		}
	}
	k.wantNative(r.t, tableOf(proxyTable, "a", "b"))
	k.wantNative(r.t, tableOf(proxyTable6, "e"))
	k.wantNative(r.t, tableOf(dockerTable, "c"))
}

// took returns the first step of a timeline.
func took(n drillNode, request api.DrillRequest) string {
	if n.iptables && request.Table == "" && request.Kind != canary.TableDeleted {
		return "0 ms canaryd has taken away its canary of table nat"
	}
	return "0 ms canaryd has taken away its own tables ip canaryd-drill and ip6 canaryd-drill"
}

// TestDrillOfNativeTables: canaryd makes a table of its own in each family, takes it, and notices,
// restores and proves that like any native table. No owner's table changes, and nothing counts as a
// flush. On a node with both kinds a drill tries both, unless the request names one.
func TestDrillOfNativeTables(t *testing.T) {
	for _, request := range []api.DrillRequest{{}, {Table: api.DrillNative}, {Kind: canary.TableDeleted}, {Table: api.DrillNative, Kind: canary.Emptied}, {Kind: canary.Replaced}} {
		t.Run(string("table "+request.Table)+", "+string(request.Kind), func(t *testing.T) {
			var dir string
			onDrillNodes(t, func() setup {
				dir = t.TempDir()
				return setup{journal: dir, flows: &flows{}, nativeStore: nativestore.New(t.TempDir(), nativestore.Identity{})}
			}, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
				before := r.tables()
				both := n.iptables && request.Table == "" && request.Kind != canary.TableDeleted
				var reply api.DrillReply
				wantMoved(t, r.moved(func() {
					reply = r.drill(request)
					if k.drillTables() != 0 {
						t.Error("the reply came before the drill's tables were removed")
					}
					r.settled()
				}, append(drillMetrics, "native")...), series{"drills_total{result=passed}": 1, "last_drill_passed": 1})
				wantTable, wantKind := api.DrillNative, canary.TableDeleted
				if both {
					wantTable, wantKind = rules.Nat, canary.ChainDeleted
				}
				if request.Kind != "" {
					wantKind = request.Kind
				}
				if reply.Result != api.DrillPassed || reply.Reason != "" || reply.Alert.Fires || reply.Table != wantTable || reply.Kind != wantKind ||
					!cmp.Equal(reply.Native, []string{"ip canaryd-drill", "ip6 canaryd-drill"}) || (len(reply.Families) == 2) != both {
					t.Errorf("the reply: %+v", reply)
				}
				nativeKind := canary.TableDeleted
				if request.Kind != "" {
					nativeKind = request.Kind
				}
				want := []string{took(n, request), "0 ms a hint: something was written"}
				at := 20
				if both {
					want = append(want, fmt.Sprintf("0 ms noticed: ipv4 nat %s, ipv6 nat %s", wantKind, wantKind), "20 ms proved by a read of all tables",
						"20 ms canaryd has taken away its own tables ip canaryd-drill and ip6 canaryd-drill", "20 ms a hint: something was written")
					at = 40
				}
				want = append(want, fmt.Sprintf("%d ms noticed: ip canaryd-drill %s, ip6 canaryd-drill %s", at-20, nativeKind, nativeKind),
					fmt.Sprintf("%d ms no process wrote any more: put back", at), fmt.Sprintf("%d ms proved by a read", at))
				var steps []string
				for _, s := range reply.Steps {
					steps = append(steps, fmt.Sprintf("%.0f ms %s", 1000*s.Seconds, s.What))
				}
				if diff := cmp.Diff(want, steps); diff != "" {
					t.Errorf("the timeline (-want +got):\n%s", diff)
				}
				r.wantBack(before, before)
				r.wantNoDrillLeft(k)
				records := r.records(0)
				if len(records) != len(want)/4 {
					t.Fatalf("records: %+v", records)
				}
				record := records[len(records)-1]
				if record.ID != reply.Flush || record.Drill != api.DrillCanary || record.Outcome != api.Drilled || record.Kind != nativeKind || len(record.Native) != 2 ||
					record.Lost.Rules+record.Lost.Chains+record.Lost.Elements != 0 || len(record.Culprits)+len(record.Writers) != 0 || record.ByText() != "canaryd drill" {
					t.Errorf("the record: %+v", record)
				}
				s := r.d.Status()
				if _, flushed := s.LastFlush(); flushed || s.LastDrill == nil || *s.LastDrill != reply.DrillEnd {
					t.Errorf("the last drill is %+v, the status says %+v", reply.DrillEnd, s.LastDrill)
				}
				for _, line := range []string{`"A canary is gone: the drill took it"`, `"A drill took the canary, and no rule"`, `"The drill's canary is back and proved"`, `"The drill has passed"`} {
					r.wantLog(line)
					if !strings.Contains(strings.Join(reply.Log, "\n"), line) {
						t.Errorf("the reply's log lacks %s: %q", line, reply.Log)
					}
				}
				if text := r.log.String(); strings.Contains(text, "Rules were lost") || strings.Contains(text, "The rules are back") || strings.Contains(text, `guarded" table="ip canaryd-drill`) {
					t.Error("the log speaks of a flush, or of a new table")
				}
				if stored, err := r.d.cfg.Native.Store.Load(); err != nil || len(stored.Tables) != 3 {
					t.Errorf("on disk: %+v, %v", stored, err)
				}
				r.stop()
				next := run(t, r.fake, setup{guarded: k, journal: dir})
				next.settled()
				if s := next.d.Status(); s.LastDrill == nil || s.LastDrill.Result != api.DrillPassed || s.LastDrill.Flush != reply.Flush {
					t.Errorf("the last drill after a restart: %+v", s.LastDrill)
				}
			})
		})
	}
}

// TestDrillOfNativeTablesUnheard: canaryd gets no hints, or the kernel drops the notifications of
// the drill's commit. A poll, or a read, shows the drill.
func TestDrillOfNativeTablesUnheard(t *testing.T) {
	for _, kind := range drill.NativeKinds() {
		t.Run(string(kind), func(t *testing.T) {
			for _, deaf := range []bool{true, false} {
				onDrillNodes(t, func() setup { return setup{deaf: deaf} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
					k.takeDrill = func() { k.with(func() { k.dropping = true }) }
					end := r.drillAside(api.DrillRequest{Table: api.DrillNative, Kind: kind})
					k.with(func() { k.dropping = false })
					if reply := end(); reply.Result != api.DrillPassed {
						t.Errorf("the reply: %+v", reply)
					}
					r.settled()
					r.wantNoDrillLeft(k)
					if record := r.oneRecord(); record.Drill != api.DrillCanary || record.Kind != kind {
						t.Errorf("the record: %+v", record)
					}
				})
			}
		})
	}
}

// TestDrillOfNativeTablesRefused: canaryd takes nothing if a drill would hide something, or could
// prove nothing.
func TestDrillOfNativeTablesRefused(t *testing.T) {
	foreign := func(k *fakeNative) {
		k.foreignDrill = true
		k.again(tableOf(proxyTable.Family.Table(native.DrillName), "theirs"))
	}
	for _, test := range []struct {
		name    string
		setup   func() setup
		prepare func(*rig, *fakeNative)
		request api.DrillRequest
		reason  string
	}{
		{"a pause", usual, func(r *rig, _ *fakeNative) { r.pause(time.Hour) }, api.DrillRequest{}, "replays are paused until "},
		{"observe mode", func() setup { return setup{mode: api.Observe} }, nil, api.DrillRequest{}, "observe mode"},
		{"a loss", usual, func(r *rig, k *fakeNative) {
			k.with(func() { k.brokenWrites = errNativeBroken })
			k.flushTable(proxyTable)
			r.after(time.Second)
		}, api.DrillRequest{}, "not healthy"},
		{"a decision", usual, func(r *rig, k *fakeNative) { k.deleteTable(proxyTable); r.settled() }, api.DrillRequest{}, "not healthy"},
		{"a kind of canaries", usual, nil, api.DrillRequest{Table: api.DrillNative, Kind: canary.ChainDeleted}, `"chain_deleted" is none of the kinds`},
		{"a kind that costs", usual, nil, api.DrillRequest{Kind: canary.Drifted}, `"drifted" is none of the kinds`},
		{"no table that is kept", func() setup { return setup{guarded: newFakeNative()} }, nil, api.DrillRequest{Table: api.DrillNative}, ""},
		{"a table of that name", usual, func(r *rig, k *fakeNative) { foreign(k); r.settled() }, api.DrillRequest{Table: api.DrillNative}, "another process has a table of the name canaryd-drill"},
		{"the kernel takes no table", usual, func(r *rig, k *fakeNative) {
			k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
		}, api.DrillRequest{Table: api.DrillNative}, "making the drill's own tables"},
		{"a flush right before", usual, func(r *rig, k *fakeNative) { k.takeDrill = k.flushRuleset }, api.DrillRequest{Table: api.DrillNative}, "another process changed the drill's own tables"},
		{"no hearing", usual, func(r *rig, k *fakeNative) { k.takeDrill = k.miss; k.stale = 0; k.brokenTake = nft.ErrStale }, api.DrillRequest{Table: api.DrillNative}, "another process changed the drill's own tables"},
	} {
		t.Run(test.name, func(t *testing.T) {
			onDrillNodes(t, test.setup, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
				if test.prepare != nil {
					test.prepare(r, k)
				}
				heals, drills := k.count().heals, k.drillTables()
				reply := r.drill(test.request)
				if reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, test.reason) || len(reply.Native) != 0 {
					t.Errorf("the reply: %+v", reply)
				}
				if r.metrics("drills_total")["drills_total{result=refused}"] != 1 || k.drillTables() != drills {
					t.Errorf("%d tables of drills are left, metrics %v", k.drillTables(), r.metrics("drills_total"))
				}
				k.with(func() { k.brokenTake = nil })
				r.settled()
				if strings.Contains(test.name, "flush") {
					r.wantNoDrillLeft(k)
					if record := r.oneRecord(); record.Drill != "" || record.Outcome != reload.Proved || len(record.Native) != 3 {
						t.Errorf("the record: %+v", record)
					}
				} else if now := k.count().heals; now > heals+1 && test.name != "a loss" {
					t.Errorf("%d replays", now-heals)
				}
				r.stop()
			})
		})
	}
}

// TestNativeFlushInNativeDrill: a process flushes during a drill of native tables. The flush is
// answered, and its record names the owners' tables and the process. The drill is void.
func TestNativeFlushInNativeDrill(t *testing.T) {
	gone := []string{"ip docker-bridges", "ip kube-proxy", "ip6 kube-proxy"}
	for _, flush := range []struct {
		name   string
		do     func(k *fakeNative)
		tables []string
	}{
		{"the ruleset", (*fakeNative).flushRuleset, gone},
		{"the ruleset, unheard", func(k *fakeNative) { k.missing(k.flushRuleset) }, gone},
		{"a table", func(k *fakeNative) { k.flushTable(dockerTable) }, []string{"ip docker-bridges"}},
		{"right after the replay", func(k *fakeNative) { k.with(func() { k.between = k.flushRuleset }) }, gone},
	} {
		t.Run(flush.name, func(t *testing.T) {
			for _, kind := range drill.NativeKinds() {
				onDrillNodes(t, func() setup { return setup{settle: 200 * time.Millisecond, journal: t.TempDir()} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
					var reply api.DrillReply
					wantMoved(t, r.moved(func() {
						end := r.drillAside(api.DrillRequest{Table: api.DrillNative, Kind: kind})
						r.after(50 * time.Millisecond)
						flush.do(k)
						reply = end()
						r.after(3 * time.Second)
					}, "flush_events", "drills_total"), series{"flush_events_total": 1, "drills_total{result=void}": 1})
					if reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "another process flushed rules meanwhile") {
						t.Errorf("the reply: %+v", reply)
					}
					r.wantNoDrillLeft(k)
					record := r.oneRecord()
					unheard := strings.Contains(flush.name, "unheard")
					if record.Drill != "" || record.Outcome != reload.Proved || record.ID != reply.Flush || record.Lost.Rules == 0 || (record.Culprit.PID == 4242) == unheard {
						t.Errorf("the record: %+v", record)
					}
					if diff := cmp.Diff(flush.tables, slices.Sorted(slices.Values(record.NativeNames()))); diff != "" {
						t.Errorf("its tables (-want +got):\n%s", diff)
					}
					if began := record.Time.Sub(reply.Time); began < 40*time.Millisecond || record.NoticedSeconds < 0 {
						t.Errorf("it begins %s after the drill, noticed after %g s", began, record.NoticedSeconds)
					}
					if kept := r.full("1").Flush; kept.ID != record.ID || kept.Outcome != record.Outcome || kept.Drill != "" {
						t.Errorf("on disk: %+v", kept)
					}
				})
			}
		})
	}
}

// TestDrillTablesTakenByAnother: during a drill another process also takes the drill's own tables,
// and no other. That is no flush of rules, and the drill is void.
func TestDrillTablesTakenByAnother(t *testing.T) {
	id := proxyTable.Family.Table(native.DrillName)
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
	}{
		{"deleted", func(k *fakeNative) { k.deleteTable(id) }},
		{"emptied", func(k *fakeNative) { k.flushTable(id) }},
		{"disabled", func(k *fakeNative) { k.dormant(id, true) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			onDrillNodes(t, func() setup { return setup{settle: 200 * time.Millisecond} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
				end := r.drillAside(api.DrillRequest{Table: api.DrillNative, Kind: canary.Emptied})
				r.after(50 * time.Millisecond)
				test.do(k)
				reply := end()
				if reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "another process wrote to the drill's own tables") {
					t.Errorf("the reply: %+v", reply)
				}
				r.settled()
				r.wantNoDrillLeft(k)
				for _, record := range r.records(0) {
					if record.Drill != api.DrillCanary {
						t.Errorf("the record: %+v", record)
					}
				}
				if m := r.metrics("flush_events", "loss_since"); m["flush_events_total"] != 0 || m["loss_since_timestamp_seconds"] != 0 {
					t.Errorf("metrics: %v", m)
				}
			})
		})
	}
}

// TestNativeDrillFails: canaryd cannot put the tables of a drill back. The drill has failed, also
// after a restart, and its tables are removed: they are no loss that lasts.
func TestNativeDrillFails(t *testing.T) {
	for _, why := range []string{"writes are refused", "reads fail", "a pause"} {
		t.Run(why, func(t *testing.T) {
			onDrillNodes(t, func() setup { return setup{journal: t.TempDir(), settle: 200 * time.Millisecond} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
				end := r.drillAside(api.DrillRequest{Table: api.DrillNative})
				switch why {
				case "writes are refused":
					k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
				case "reads fail":
					k.with(func() { k.brokenReads = errNativeBroken })
				default:
					k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
					r.pause(time.Hour)
					k.with(func() { k.brokenWrites = nil })
				}
				r.after(5 * time.Second)
				if r.d.Status().Ready() == nil {
					t.Error("the node is ready in the middle of a drill that fails")
				}
				reply := end()
				if reply.Result != api.DrillFailed || why == "a pause" && !strings.Contains(reply.Reason, "replays were paused meanwhile") {
					t.Errorf("the reply: %+v", reply)
				}
				k.with(func() { k.brokenWrites, k.brokenReads = nil, nil })
				if why == "a pause" {
					r.resume()
				}
				r.after(30 * time.Second)
				r.wantNoDrillLeft(k)
				m := r.metrics("flush_events", "drills_total", "last_drill_passed", "loss_since", "contended")
				if m["flush_events_total"] != 0 || m["drills_total{result=failed}"] != 1 || m["last_drill_passed"] != 0 || m["loss_since_timestamp_seconds"] != 0 || m["contended"] != 0 {
					t.Errorf("metrics: %v", m)
				}
				for _, record := range r.records(0) {
					if record.Drill != api.DrillCanary || !record.DrillFailed || record.Open() || record.ByText() != "canaryd drill" {
						t.Errorf("the record: %+v", record)
					}
				}
				if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillPassed {
					t.Errorf("the next drill: %+v", reply)
				}
			})
		})
	}
}

// TestDrillTablesStay: the tables of a drill cannot be removed at its end. canaryd tries again, and
// nothing else depends on it.
func TestDrillTablesStay(t *testing.T) {
	onDrillNodes(t, usual, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
		k.takeDrill = func() { k.with(func() { k.brokenRemovals = errNativeBroken }) }
		if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillPassed || k.drillTables() != 2 {
			t.Errorf("the reply: %+v, and %d tables are left", reply, k.drillTables())
		}
		r.after(5 * time.Second)
		r.wantReady()
		r.wantLog("A drill's own table could not be removed")
		k.flushRuleset()
		r.settled()
		k.again(native.NewDrillTable(proxyTable.Family, "0123456789abcdef"))
		k.with(func() { k.brokenRemovals = nil })
		r.settled()
		r.wantNoDrillLeft(k)
		if f, flushed := r.d.Status().LastFlush(); !flushed || len(f.Native) != 3 {
			t.Errorf("the flush: %+v", f)
		}
	})
}

// TestManyNativeDrills: after many drills canaryd still answers the next flush at once, and sees no
// contention.
func TestManyNativeDrills(t *testing.T) {
	onDrillNodes(t, usual, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
		for i := range 50 {
			if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillPassed {
				t.Fatalf("drill %d: %+v", i, reply)
			}
		}
		k.flushRuleset()
		r.after(50 * time.Millisecond)
		r.wantNoDrillLeft(k)
		if m := r.metrics("contended", "flush_events"); len(m) != 1 || m["flush_events_total"] != 1 {
			t.Errorf("metrics: %v", m)
		}
	})
}

// TestOwnerInNativeDrill: owners write, and make a new table, during a drill. All of it lasts.
func TestOwnerInNativeDrill(t *testing.T) {
	onDrillNodes(t, func() setup {
		return setup{settle: 200 * time.Millisecond, nativeStore: nativestore.New(t.TempDir(), nativestore.Identity{})}
	}, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
		end := r.drillAside(api.DrillRequest{Table: api.DrillNative})
		r.after(20 * time.Millisecond)
		k.with(func() { k.brokenWrites = errNativeBroken })
		k.sync(tableOf(proxyTable, "a", "b", "new"))
		k.again(tableOf(proxyTable.Family.Table("later"), "x"))
		r.after(10 * time.Second) // so that the tables are saved in the middle
		stored, err := r.d.cfg.Native.Store.Load()
		must(t, err)
		if len(stored.Tables) != 4 || k.drillTables() != 0 {
			t.Errorf("on disk are %d tables, and %d of the drill exist", len(stored.Tables), k.drillTables())
		}
		k.with(func() { k.brokenWrites = nil })
		if reply := end(); reply.Result != api.DrillPassed {
			t.Errorf("the reply: %+v", reply)
		}
		r.settled()
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b", "new"))
		k.wantNative(t, tableOf(proxyTable.Family.Table("later"), "x"))
		if n := k.drillTables(); n != 0 {
			t.Errorf("%d tables of a drill came back", n)
		}
		if f, _ := r.d.Status().LastFlush(); len(f.Native) != 4 {
			t.Errorf("the flush: %+v", f)
		}
	})
}

// TestDrillBetweenItsParts: on a node with both kinds the second part cannot begin. The drill is
// void, and says which part it tried.
func TestDrillBetweenItsParts(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
		reply := r.drill(api.DrillRequest{})
		if reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "table nat is tried, and native tables are not: making the drill's own tables: ") || len(reply.Families) != 2 || len(reply.Native) != 0 {
			t.Errorf("the reply: %+v", reply)
		}
		r.settled()
		r.wantReady()
		if k.drillTables() != 0 || r.metrics("drills_total")["drills_total{result=void}"] != 1 {
			t.Errorf("metrics: %v", r.metrics("drills_total"))
		}
	})
}

// TestStopInNativeDrill: a daemon ends, or a cleanup ends its work, in the middle of a drill. The
// drill's tables go with it.
func TestStopInNativeDrill(t *testing.T) {
	for name, end := range map[string]func(r *rig, k *fakeNative){
		"stop":    func(r *rig, _ *fakeNative) { r.stop() },
		"cleanup": func(r *rig, _ *fakeNative) { must(r.t, r.d.Cleanup(r.t.Context(), api.CleanupRequest{})) },
		"stop between two tries": func(r *rig, k *fakeNative) {
			k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
			r.after(5 * time.Second)
			r.stop()
		},
		"cleanup between two tries": func(r *rig, k *fakeNative) {
			k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
			r.after(5 * time.Second)
			must(r.t, r.d.Cleanup(r.t.Context(), api.CleanupRequest{}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onDrillNodes(t, func() setup { return setup{settle: time.Second} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
				go func() {
					_, _ = r.d.Drill(r.t.Context(), api.DrillRequest{Table: api.DrillNative, Kind: canary.Emptied})
				}()
				r.after(100 * time.Millisecond)
				if k.drillTables() != 2 {
					t.Fatal("the drill is over")
				}
				end(r, k)
				r.after(time.Second)
				if left := k.drillTables(); left != 0 {
					t.Errorf("%d tables of the drill are left", left)
				}
			})
		})
	}
}

// TestNativeDrillBySchedule: --drill-every tries native tables on a node that has no others.
func TestNativeDrillBySchedule(t *testing.T) {
	onDrillNodes(t, func() setup { return setup{drillEvery: period} }, func(t *testing.T, n drillNode, r *rig, k *fakeNative) {
		r.after(4 * period)
		if passed, refused := r.drilled(); passed < 3 || passed > 4 || refused != 0 {
			t.Errorf("%v drills have passed, %v were refused", passed, refused)
		}
		r.wantLog(`takes="its own tables ip canaryd-drill and ip6 canaryd-drill" kind="table_deleted"`)
		r.wantNoDrillLeft(k)
	})
}
