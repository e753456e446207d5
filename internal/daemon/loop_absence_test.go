package daemon

import (
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// absentSum is the sum of all absences in the histogram.
func (r *rig) absentSum() time.Duration {
	r.t.Helper()
	families, err := r.reg.Gather()
	must(r.t, err)
	for _, family := range families {
		if family.GetName() == "canaryd_rules_absent_seconds" {
			return api.Seconds(family.GetMetric()[0].GetHistogram().GetSampleSum())
		}
	}
	r.t.Fatal("there is no histogram of absences")
	return 0
}

// TestAbsentWhileDown: rules are lost while no canaryd runs. They count as absent since they
// were last known to be in force, as a bound, and record and histogram agree.
func TestAbsentWhileDown(t *testing.T) {
	const down = 27 * time.Second
	for _, test := range []struct {
		name   string
		killed bool
		most   time.Duration
	}{{"stopped", false, 29 * time.Second}, {"killed", true, 90 * time.Second}} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, id := t.TempDir(), identity(backend)
				first := start(t, backend, setup{store: openStore(t, dir, id)})
				before := first.tables()
				first.after(10*time.Minute + 13*time.Second)
				if test.killed { // a killed daemon leaves the present files
					left := t.TempDir()
					must(t, os.CopyFS(left, os.DirFS(dir)))
					dir = left
				}
				first.stop()
				first.flushNat()
				flushed := first.tables()
				time.Sleep(down)
				r := run(t, first.fake, setup{store: openStore(t, dir, id)})
				r.settled()
				r.wantBack(before, flushed)
				record := r.oneRecord()
				absent := api.Seconds(record.AbsentSeconds)
				if !record.AbsentAtMost || absent < down || absent > test.most || record.Time.Sub(record.LastInForce) < down || record.Outcome != reload.Proved {
					t.Errorf("absent for %s, want at most %s; the record is %+v", absent, test.most, record)
				}
				if sum := r.absentSum(); sum != absent {
					t.Errorf("the histogram has %s, the record %s", sum, absent)
				}
				r.wantLog("absentAtMost")
				text, err := json.Marshal(record)
				must(t, err)
				var object map[string]any
				must(t, json.Unmarshal(text, &object))
				if object["absentAtMost"] != true || object["lastInForce"] == nil {
					t.Errorf("the record's JSON is %s", text)
				}

				r.flushNat()
				r.settled()
				if last := r.records(1)[0]; last.AbsentAtMost || last.AbsentSeconds > 1 || !last.LastInForce.IsZero() {
					t.Errorf("what is seen to happen is no bound: %+v", last)
				}
			})
		})
	}
}

// TestAbsentWhileDownObserved: the same in observe mode, where the owner must put its rules
// back.
func TestAbsentWhileDownObserved(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := start(t, backend, setup{store: openStore(t, dir, id), mode: api.Observe})
		before := first.tables()
		first.stop()
		first.flushNat()
		time.Sleep(time.Minute)
		r := run(t, first.fake, setup{store: openStore(t, dir, id), mode: api.Observe})
		r.settled()
		r.write(rules.Nat, sectionOf(before[rules.IPv4][rules.Nat])...)
		r.after(20 * time.Second)
		r.wantReady()
		record := r.oneRecord()
		if absent := api.Seconds(record.AbsentSeconds); !record.AbsentAtMost || absent < time.Minute || absent > 90*time.Second || r.absentSum() != absent {
			t.Errorf("the record is %+v, the histogram has %s", record, r.absentSum())
		}
	})
}

// TestFlushedAsItEnds: a flush happens right before a run ends. The run looks once more, and
// does not store that the lost rules are in force.
func TestFlushedAsItEnds(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := start(t, backend, setup{store: openStore(t, dir, id), deaf: true})
		first.after(5*time.Second + 300*time.Millisecond)
		flushed := time.Now()
		first.flushNat()
		first.stop()
		time.Sleep(time.Minute)
		r := run(t, first.fake, setup{store: openStore(t, dir, id)})
		r.settled()
		r.wantReady()
		if record := r.oneRecord(); record.LastInForce.After(flushed) || api.Seconds(record.AbsentSeconds) < time.Minute {
			t.Errorf("flushed at %s, the record is %+v", flushed, record)
		}
	})
}
