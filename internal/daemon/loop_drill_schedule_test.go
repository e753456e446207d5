package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// period is the time between two drills.
const period = 10 * time.Minute

// drilled returns the numbers of passed and refused drills.
func (r *rig) drilled() (passed, refused float64) {
	r.t.Helper()
	now := r.metrics("drills_total")
	return now["drills_total{result=passed}"], now["drills_total{result=refused}"]
}

// TestDrillBySchedule: each drill begins a period after the last one.
func TestDrillBySchedule(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{drillEvery: period, journal: dir})
		want := func(when string, passed, refused float64) {
			t.Helper()
			if p, n := r.drilled(); p != passed || n != refused {
				t.Errorf("%s: %v drills have passed, %v were refused; want %v and %v", when, p, n, passed, refused)
			}
		}
		begun := time.Now() // some seconds after the start, so that the first drill may be over
		for p, _ := r.drilled(); p == 0 && time.Since(begun) < period; p, _ = r.drilled() {
			r.after(time.Second)
		}
		r.after(period / 2)
		want("after the first drill", 1, 0)
		r.wantLog(`"A drill begins" takes="its canary of table nat" kind="chain_deleted" because="--drill-every"`)
		r.after(2 * period)
		want("two periods after that", 3, 0)

		next := r.d.Status().LastDrill.Time.Add(period)
		r.after(time.Until(next) - time.Minute)
		if reply := r.drill(api.DrillRequest{}); reply.Result != api.DrillPassed {
			t.Errorf("the drill on request: %+v", reply)
		}
		r.after(2 * time.Minute)
		want("after one on request a minute before its time", 4, 0)
		r.after(period - 2*time.Minute)
		want("a period after that", 5, 0)

		// During a pause no drill begins. The due drill begins at its end.
		r.after(period - time.Minute)
		r.pause(time.Hour)
		r.after(2 * time.Minute)
		want("in a pause", 5, 0)
		r.resume()
		r.after(time.Minute)
		want("after the pause", 6, 0)

		// After a restart canaryd continues with the earlier period.
		r.after(period / 2)
		r.stop()
		r = start(t, backend, setup{drillEvery: period, journal: dir})
		r.after(period/2 - 2*time.Minute)
		want("after a restart, before its time", 0, 0)
		r.after(2 * time.Minute)
		want("after a restart, in its time", 1, 0)
	})
}

// TestDrillByScheduleRefused: canaryd tries a refused drill again after a tenth of the period.
func TestDrillByScheduleRefused(t *testing.T) {
	oneBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{drillEvery: period, protect: []string{"NOBODYS-*"}})
		r.after(period)
		_, first := r.drilled()
		r.after(period)
		if passed, then := r.drilled(); passed != 0 || first < 1 || then != first+10 {
			t.Errorf("%v drills have passed; %v were refused by the end of the first period, %v a period later", passed, first, then)
		}
	})
}

// TestNoDrillInObserve: in observe mode a drill would leave the table without its canary.
func TestNoDrillInObserve(t *testing.T) {
	oneBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe, drillEvery: time.Minute})
		r.after(period)
		if passed, refused := r.drilled(); passed+refused != 0 {
			t.Errorf("%v drills have passed, %v were refused", passed, refused)
		}
	})
}
