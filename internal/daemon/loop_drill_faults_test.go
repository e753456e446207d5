package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestDrillForRealBesideOwner: a drill restores a jump that its owner has just written. It
// takes nothing, and so restores nothing, if an owner has just deleted a jump.
func TestDrillForRealBesideOwner(t *testing.T) {
	for _, test := range []struct {
		name   string
		lines  []string
		result api.DrillResult
	}{
		{"a jump is new", []string{":KUBE-NEW - [0:0]", "-A KUBE-NEW -j RETURN", "-A PREROUTING -j KUBE-NEW"}, api.DrillPassed},
		{"a jump is gone", []string{`-D PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES`}, api.DrillRefused},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				r.write(rules.Nat, test.lines...)
				left := r.chain(rules.IPv4, rules.Nat, "PREROUTING")
				if reply := r.drill(api.DrillRequest{ForReal: true}); reply.Result != test.result || reply.Result == api.DrillRefused && !strings.Contains(reply.Reason, "which is not learned yet") {
					t.Errorf("the reply: %+v", reply)
				}
				if diff := cmp.Diff(left, r.chain(rules.IPv4, rules.Nat, "PREROUTING")); diff != "" {
					t.Errorf("PREROUTING (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestDrillFails: a drill whose replay is refused has failed, also after a restart. Until they
// are back its takings are a loss, counted once and blamed on canaryd.
func TestDrillFails(t *testing.T) {
	for _, request := range []api.DrillRequest{{}, {ForReal: true}} {
		sort, flushes := api.DrillCanary, 0.0
		if request.ForReal {
			sort, flushes = api.DrillForReal, 1
		}
		t.Run(string(sort), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				fake := loadedFake(t, backend)
				r := run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
				r.settled()
				end := r.drillAside(request)
				fake.FailRestores(-1, iptables.ReasonOther)
				reply := end()
				if reply.Result != api.DrillFailed || !strings.Contains(reply.Reason, "it is not back after ") {
					t.Errorf("the reply: %+v", reply)
				}
				if r.d.Status().Ready() == nil {
					t.Error("the node is ready without what the drill took")
				}
				m := r.metrics("drills_total", "last_drill_passed", "loss_since", "replays_total")
				if m["drills_total{result=failed}"] != 1 || m["loss_since_timestamp_seconds"] == 0 || m["last_drill_passed"] != 0 || m["replays_total{family=ipv4,result=failed}"] == 0 {
					t.Errorf("metrics: %v", m)
				}
				fake.FailRestores(0, "")
				r.after(time.Minute)
				r.wantReady()
				if n := r.metrics("flush_events")["flush_events_total"]; n != flushes {
					t.Errorf("%v flushes, want %v", n, flushes)
				}
				if m := r.metrics("flushes_total"); request.ForReal && m["flushes_total{family=ipv4,kind=jumps_missing,table=nat}"] != 1 {
					t.Errorf("metrics: %v", m)
				}
				if record := r.oneRecord(); record.Drill != sort || record.ByText() != "canaryd drill" {
					t.Errorf("the record: %+v", record)
				}
				if s := r.d.Status(); s.LastDrill.Result != api.DrillFailed || !strings.Contains(pageOf(t, s.Public()), "The last drill failed ") {
					t.Errorf("the last drill: %+v", s.LastDrill)
				}
				r.stop()
				r.after(time.Second)
				next := run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
				next.settled()
				if s := next.d.Status(); s.LastDrill == nil || s.LastDrill.Result != api.DrillFailed {
					t.Errorf("the last drill after a restart: %+v", s.LastDrill)
				}
			})
		})
	}
}

// TestPauseInDrill: a pause prevents the answer to a drill, and the drill's reason names the
// pause.
func TestPauseInDrill(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{settle: 200 * time.Millisecond})
		end := r.drillAside(api.DrillRequest{ForReal: true})
		r.fake.FailRestores(-1, iptables.ReasonOther)
		r.pause(time.Hour)
		r.fake.FailRestores(0, "")
		if reply := end(); reply.Result != api.DrillFailed || !strings.Contains(reply.Reason, "replays were paused meanwhile") {
			t.Errorf("the reply: %+v", reply)
		}
		r.resume()
		r.settled()
		if record := r.oneRecord(); record.Drill != api.DrillForReal || record.Outcome != reload.Proved {
			t.Errorf("the record: %+v", record)
		}
		if n := r.metrics("flushes_total")["flushes_total{family=ipv4,kind=jumps_missing,table=nat}"]; n != 1 {
			t.Errorf("the loss is counted %v times", n)
		}
	})
}

// TestFlushInDrillForReal: a drill has taken the jumps of a chain, and another process flushes
// the same chain. The same jumps are missing then. The drill is void, and the record is a
// flush's.
func TestFlushInDrillForReal(t *testing.T) {
	for _, flush := range []struct {
		name  string
		table rules.TableName
		chain string
	}{
		{"the same chain", rules.Nat, "PREROUTING"},
		{"another chain", rules.Nat, "OUTPUT"},
		{"the table", rules.Nat, ""},
		{"another table", rules.Filter, ""},
	} {
		t.Run(flush.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{settle: 200 * time.Millisecond})
				r.write(rules.Nat, "-A PREROUTING -p tcp -m tcp --dport 9 -j RETURN") // another owner's
				r.after(20 * time.Second)
				end := r.drillAside(api.DrillRequest{ForReal: true})
				r.after(20 * time.Millisecond)
				must(t, r.fake.Flush(rules.IPv4, flush.table, flush.chain))
				if reply := end(); reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "another process flushed rules meanwhile") {
					t.Errorf("the reply: %+v", reply)
				}
				r.settled()
				record := r.oneRecord()
				if record.Drill != "" || record.Outcome != reload.Proved || backend == iptables.NFT && flush.chain != "PREROUTING" && record.Culprit.PID == 0 {
					t.Errorf("the record is of %q, by %s: %+v", record.Drill, record.ByText(), record)
				}
			})
		})
	}
}

// TestDrillForRealOfAnotherTable: an operator requests a drill of another table than nat for
// real. canaryd refuses, and does not take the jumps of nat instead.
func TestDrillForRealOfAnotherTable(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		for _, request := range []api.DrillRequest{{ForReal: true, Table: rules.Filter}, {ForReal: true, Kind: canary.Emptied}} {
			if reply := r.drill(request); reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, "leave out --table and --kind") {
				t.Errorf("the reply to %+v: %+v", request, reply)
			}
		}
		r.settled()
		if n := len(r.records(0)); n != 0 {
			t.Errorf("%d records", n)
		}
	})
}

// TestRestoreInDrill: `canaryd restore` undoes a drill before canaryd notices it. The drill is
// void.
func TestRestoreInDrill(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true})
		end := r.drillAside(api.DrillRequest{})
		r.restore(api.RestoreRequest{})
		if reply := end(); reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "canaryd restore undid the drill") {
			t.Errorf("the reply: %+v", reply)
		}
		r.settled()
		r.wantReady()
	})
}

// TestDrillOfNothing: canaryd refuses a drill without guarded rules, which would pass and prove
// nothing.
func TestDrillOfNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, iptablestest.NewFake(backend), setup{})
		r.settled()
		r.wantBare()
		if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillRefused || !strings.Contains(reply.Reason, "there is no rule to guard") {
			t.Errorf("the reply: %+v", reply)
		}
	})
}

// TestNativeFlushInDrill: a process deletes native tables during a drill. That flush has a
// record of its own, and the drill's record remains a drill's.
func TestNativeFlushInDrill(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		end := r.drillAside(api.DrillRequest{Table: rules.Nat})
		k.flushRuleset()
		end()
		r.settled()
		r.wantReady()
		list := r.d.Status().Flushes
		drills := 0
		for _, f := range list {
			switch {
			case f.Drill == api.DrillCanary:
				drills++
				if len(f.Native) != 0 || f.Lost.Rules != 0 {
					t.Errorf("the drill's record: %+v", f)
				}
			case len(f.Native) != 2 || f.Outcome != reload.Proved || f.Culprit.PID != 4242:
				t.Errorf("the flush's record: %+v", f)
			}
		}
		if drills != 1 || len(list) != 2 {
			t.Errorf("%d records, %d of drills: %+v", len(list), drills, list)
		}
	})
}
