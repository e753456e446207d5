package daemon

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// drill requests a drill and waits for its end.
func (r *rig) drill(request api.DrillRequest) api.DrillReply {
	r.t.Helper()
	reply, err := r.d.Drill(r.t.Context(), request)
	must(r.t, err)
	return reply
}

// drillAside requests a drill, and returns a function that waits for its end.
func (r *rig) drillAside(request api.DrillRequest) func() api.DrillReply {
	replies := make(chan api.DrillReply, 1)
	go func() {
		reply, err := r.d.Drill(context.Background(), request)
		if err != nil {
			r.t.Error(err)
		}
		replies <- reply
	}()
	synctest.Wait()
	return func() api.DrillReply { return <-replies }
}

// drillMetrics are the prefixes of all metrics that a drill may change.
var drillMetrics = append([]string{"drills_total", "last_drill_passed", "last_flush", "conntrack"}, lossMetrics...)

// TestDrill: canaryd takes its own canary, and notices, restores and proves that like any other
// loss. The reply has the times. No rule changes, and nothing counts as a flush.
func TestDrill(t *testing.T) {
	for _, kind := range canary.DrillKinds() {
		t.Run(string(kind), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{journal: t.TempDir(), flows: &flows{}})
				before := r.tables()
				nonces := fmt.Sprint(r.fake.SaveTable(rules.IPv4, rules.Nat))
				var reply api.DrillReply
				wantMoved(t, r.moved(func() {
					reply = r.drill(api.DrillRequest{Kind: kind})
					r.settled()
				}, drillMetrics...), series{"drills_total{result=passed}": 1, "last_drill_passed": 1})
				if reply.Result != api.DrillPassed || reply.Reason != "" || !cmp.Equal(reply.Families, rules.Families()) || reply.Alert.Fires {
					t.Errorf("the reply: %+v", reply)
				}
				var steps []string
				for _, s := range reply.Steps {
					steps = append(steps, fmt.Sprintf("%g ms %s", 1000*s.Seconds, s.What))
				}
				if diff := cmp.Diff([]string{
					"0 ms canaryd has taken away its canary of table nat",
					"0 ms a hint: something was written",
					fmt.Sprintf("0 ms noticed: ipv4 nat %s, ipv6 nat %s", kind, kind),
					"20 ms proved by a read of all tables",
				}, steps); diff != "" {
					t.Errorf("the timeline (-want +got):\n%s", diff)
				}
				r.wantBack(before, before)
				if text := r.fake.Save(rules.IPv4); strings.Contains(text, canary.DrillChain) || text == nonces {
					t.Errorf("after the drill:\n%s", text)
				}
				record := r.oneRecord()
				if record.ID != reply.Flush || record.Drill != api.DrillCanary || record.Outcome != api.Drilled || record.Kind != kind ||
					record.Lost.Rules != 0 || len(record.Culprits)+len(record.Writers) != 0 || record.ByText() != "canaryd drill" {
					t.Errorf("the record: %+v", record)
				}
				s := r.d.Status()
				page := pageOf(t, s.Public())
				for _, want := range []string{"The last drill passed ", "<small>canaryd drill</small>", `<span class="badge good">drilled</span>`} {
					if !strings.Contains(page, want) {
						t.Errorf("the page lacks %s", want)
					}
				}
				if _, flushed := s.LastFlush(); flushed || s.LastDrill == nil || *s.LastDrill != reply.DrillEnd {
					t.Errorf("the last drill is %+v, the status says %+v", reply.DrillEnd, s.LastDrill)
				}
				for _, line := range []string{`"A canary is gone: the drill took it"`, `"A drill took the canary, and no rule"`, `"The drill's canary is back and proved"`} {
					r.wantLog(line)
					if !strings.Contains(strings.Join(reply.Log, "\n"), line) {
						t.Errorf("the reply's log lacks %s: %q", line, reply.Log)
					}
				}
				if strings.Contains(r.log.String(), "Rules were lost") || strings.Contains(r.log.String(), "The rules are back") {
					t.Error("the log speaks of a flush")
				}
			})
		})
	}
}

// TestDrillWithoutHints: without hints the poll notices the drill.
func TestDrillWithoutHints(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true})
		if reply := r.drill(api.DrillRequest{Table: rules.Filter}); reply.Result != api.DrillPassed {
			t.Errorf("the reply: %+v", reply)
		}
	})
}

// TestDrillForReal: a drill takes and restores the protected jumps of PREROUTING. It counts as
// a flush, and rules of others in that chain stay.
func TestDrillForReal(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		const others = "-p tcp -m tcp --dport 2222 -j ACCEPT"
		r.write(rules.Nat, "-A PREROUTING "+others)
		r.settled()
		before, taken := r.tables(), -1
		r.fake.BeforeRestore(func() {
			if taken < 0 {
				taken = 0
				return
			}
			taken = max(taken, len(before[rules.IPv4][rules.Nat].Chain("PREROUTING").Rules)-len(r.tables()[rules.IPv4][rules.Nat].Chain("PREROUTING").Rules))
		})
		var reply api.DrillReply
		wantMoved(t, r.moved(func() {
			reply = r.drill(api.DrillRequest{ForReal: true})
			r.settled()
		}, "drills_total", "flush_events", "flushes", "rules_absent_seconds"), series{
			"drills_total{result=passed}": 1, "flush_events_total": 1, "rules_absent_seconds": 1,
			"flushes_total{family=ipv4,kind=jumps_missing,table=nat}": 1, "flushes_total{family=ipv6,kind=jumps_missing,table=nat}": 1,
		})
		if reply.Result != api.DrillPassed || reply.Jumps == 0 || !reply.Alert.Fires {
			t.Errorf("the reply: %+v", reply)
		}
		r.wantBack(before, before)
		if taken < 2 {
			t.Errorf("%d rules were gone from PREROUTING, want a jump and its witness at least", taken)
		}
		if record := r.oneRecord(); record.Drill != api.DrillForReal || record.Outcome != reload.Proved || record.Lost.Jumps != reply.Jumps {
			t.Errorf("the record: %+v", record)
		}
	})
}

// TestDrillRefused: canaryd takes nothing if a drill would hide something, or could prove
// nothing.
func TestDrillRefused(t *testing.T) {
	for _, test := range []struct {
		name    string
		setup   setup
		prepare func(*rig)
		request api.DrillRequest
		reason  string
	}{
		{"a pause", setup{}, func(r *rig) { r.pause(time.Hour) }, api.DrillRequest{}, "replays are paused until "},
		{"observe mode", setup{mode: api.Observe}, func(*rig) {}, api.DrillRequest{}, "observe mode"},
		{"a loss", setup{}, func(r *rig) { r.fake.FailRestores(-1, iptables.ReasonOther); r.flushNat(); r.after(time.Second) }, api.DrillRequest{}, "not healthy"},
		{"a table that is none", setup{}, func(*rig) {}, api.DrillRequest{Table: "broute"}, `"broute" is none of the tables`},
		{"a table without a canary", setup{}, func(*rig) {}, api.DrillRequest{Table: "raw"}, "nothing is protected in raw, so that it has no canary"},
		{"a kind that costs", setup{}, func(*rig) {}, api.DrillRequest{Kind: canary.TableDeleted}, `"table_deleted" is none of the kinds`},
	} {
		t.Run(test.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, test.setup)
				test.prepare(r)
				restores, text := r.fake.Restores(), r.fake.Save(rules.IPv4)
				reply := r.drill(test.request)
				if reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, test.reason) {
					t.Errorf("the reply: %+v", reply)
				}
				if r.fake.Save(rules.IPv4) != text || r.fake.Restores() != restores || r.metrics("drills_total")["drills_total{result=refused}"] != 1 {
					t.Error("something was written, or the refusal is not counted")
				}
				r.stop()
			})
		})
	}
}

// TestDrillTwice: canaryd refuses a second drill during the first.
func TestDrillTwice(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true})
		first := r.drillAside(api.DrillRequest{})
		if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, "another drill") {
			t.Errorf("the second reply: %+v", reply)
		}
		if reply := first(); reply.Result != api.DrillPassed {
			t.Errorf("the first reply: %+v", reply)
		}
	})
}

// TestFlushInDrill: a flush during a drill counts as a flush, whether it takes the stand-in or
// another table.
func TestFlushInDrill(t *testing.T) {
	oneOfEachScenario(t, func(t *testing.T, backend iptables.Backend, s scenario.Scenario) {
		foreign := leftBy(t, backend, s.Name)
		r := start(t, backend, setup{settle: 200 * time.Millisecond})
		if s.Prepare != nil {
			must(t, s.Prepare(t.Context(), r.programs()))
			r.after(3 * time.Second)
		}
		before := r.tables()
		var reply api.DrillReply
		moved := r.moved(func() {
			end := r.drillAside(api.DrillRequest{Kind: canary.Emptied})
			r.after(30 * time.Millisecond)
			must(t, s.Do(t.Context(), r.programs()))
			reply = end()
			r.after(3 * time.Second)
		}, "flush_events", "drills_total")
		wantMoved(t, moved, series{"flush_events_total": 1, "drills_total{result=void}": 1})
		r.wantBack(before, foreign)
		if reply.Result != api.DrillVoid {
			t.Errorf("the reply: %+v", reply)
		}
		if record := r.oneRecord(); record.Drill != "" || record.Lost.Rules == 0 {
			t.Errorf("the record: %+v", record)
		}
	})
}

// TestOwnerInDrill: an owner adds and removes rules during a drill, and both last. Without the
// stand-in the lost canary would make canaryd restore the removed rules.
func TestOwnerInDrill(t *testing.T) {
	for _, kind := range canary.DrillKinds() {
		t.Run(string(kind), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{settle: 200 * time.Millisecond})
				must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
				r.after(5 * time.Second)
				end := r.drillAside(api.DrillRequest{Kind: kind})
				r.after(30 * time.Millisecond)
				r.write(rules.Nat, ":KUBE-SVC-LATECOMER2345672 - [0:0]", ":KUBE-SEP-LATECOMER2345673 - [0:0]",
					`-D KUBE-SERVICES -m comment --comment "demo/latecomer cluster IP" -m tcp -p tcp -d 10.96.77.1 --dport 80 -j KUBE-SVC-LATECOMER2345672`,
					"-X KUBE-SVC-LATECOMER2345672", "-X KUBE-SEP-LATECOMER2345673", "-A KUBE-NODEPORTS -p tcp -m tcp --dport 9999 -j KUBE-MARK-MASQ")
				left := without(r.tables())
				if reply := end(); reply.Result != api.DrillPassed {
					t.Errorf("the reply: %+v", reply)
				}
				r.after(20 * time.Second)
				left = strings.NewReplacer("ipv4 nat "+canary.DrillChain+" \n", "", "ipv6 nat "+canary.DrillChain+" \n", "").Replace(left)
				if diff := cmp.Diff(left, without(r.tables())); diff != "" {
					t.Errorf("what the owner left is otherwise (-left +now):\n%s", diff)
				}
				r.wantReady()
				if n := r.metrics("flush_events")["flush_events_total"]; n != 0 {
					t.Errorf("%v flushes", n)
				}
			})
		})
	}
}

// TestManyDrills: after many drills canaryd still answers the next flush at once, and sees no
// contention.
func TestManyDrills(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		for n := range 50 {
			if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillPassed {
				t.Fatalf("drill %d: %+v", n, reply)
			}
		}
		before := r.tables()
		r.flushNat()
		r.after(50 * time.Millisecond)
		r.wantBack(before, leftBy(t, backend, "flush-nat"))
		if m := r.metrics("contended", "flush_events"); len(m) != 1 || m["flush_events_total"] != 1 {
			t.Errorf("metrics: %v", m)
		}
	})
}

// TestDrillOfDeclared: a drill touches no declared rule.
func TestDrillOfDeclared(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := startDeclared(t, backend, setup{})
		r.wantReady()
		before := r.tables()
		for _, kind := range canary.DrillKinds() {
			if reply := r.drill(api.DrillRequest{Kind: kind, Table: rules.Filter}); reply.Result != api.DrillPassed {
				t.Errorf("the reply: %+v", reply)
			}
			r.settled()
		}
		r.wantBack(before, before)
		r.wantDeclared(medium(t))
		if m := r.metrics("flush_events", "flushes", "rules_absent", "loss_since", "contended"); len(m) > 0 {
			t.Errorf("metrics: %v", m)
		}
	})
}

// TestRestartInDrill: a daemon ends during a drill. The next one restores the canary without a
// flush record, and knows the drill from the journal.
func TestRestartInDrill(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		fake := loadedFake(t, backend)
		first := run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir, deaf: true})
		first.settled()
		before := first.tables()
		go func() { _, _ = first.d.Drill(first.t.Context(), api.DrillRequest{}) }()
		synctest.Wait()
		fake.FailRestores(-1, iptables.ReasonOther)
		first.stop()
		if !strings.Contains(fake.Save(rules.IPv4), canary.DrillChain) {
			t.Fatal("the drill has ended before the daemon")
		}
		fake.FailRestores(0, "")
		r := run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
		r.settled()
		r.after(20 * time.Second)
		r.wantBack(before, before)
		if text := fake.Save(rules.IPv4) + fake.Save(rules.IPv6); strings.Contains(text, canary.DrillChain) {
			t.Errorf("the stand-in is left:\n%s", text)
		}
		if n := r.metrics("flush_events")["flush_events_total"]; n != 0 {
			t.Errorf("%v flushes", n)
		}
		for _, record := range r.records(0) {
			if record.Drill != api.DrillCanary || record.Lost.Rules != 0 {
				t.Errorf("the record: %+v", record)
			}
		}
	})
}
