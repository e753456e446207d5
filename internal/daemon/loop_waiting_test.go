package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// wantWaiting fails unless the only record is open with that outcome, and was so for that
// long.
func (r *rig) wantWaiting(outcome api.Outcome, since time.Time) {
	r.t.Helper()
	record := r.oneRecord()
	absent, known := record.AbsentFor(time.Now())
	if record.Outcome != outcome || !record.Open() || record.AbsentSeconds != 0 {
		r.t.Errorf("the record is %+v, want it open and %s", record, outcome)
	}
	if !known || absent != time.Since(since) || absent < time.Second {
		r.t.Errorf("absent for %s (known: %t), want %s", absent, known, time.Since(since))
	}
}

// TestObserveWaits: the record of an observed outage stays open until the owner has restored
// the rules, or an operator requests a restore. In the second case canaryd does not credit the
// owner.
func TestObserveWaits(t *testing.T) {
	const owners, request = "The rules are back: their owner wrote them", "The rules are back: they were restored on request"
	for _, test := range []struct {
		name       string
		end        func(r *rig)
		outcome    api.Outcome
		says, hush string
	}{
		{"restore", func(r *rig) { r.restore(api.RestoreRequest{}) }, reload.Proved, request, owners},
		{"owner", func(r *rig) {
			must(r.t, scenario.Load(r.t.Context(), r.programs(), rules.IPv4))
		}, reload.Skipped, owners, request},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{mode: api.Observe, journal: t.TempDir()})
				flushed := time.Now()
				r.flushNat()
				r.after(90 * time.Second)
				r.wantWaiting(api.WaitingObserve, flushed)
				ended := time.Now()
				test.end(r)
				r.after(35 * time.Second)
				r.wantReady()
				record := r.oneRecord()
				if record.Outcome != test.outcome || record.Open() || record.AbsentSeconds < ended.Sub(flushed).Seconds() {
					t.Errorf("the record is %+v, want %s after %s", record, test.outcome, ended.Sub(flushed))
				}
				r.wantLog(test.says)
				if strings.Contains(r.log.String(), test.hush) {
					t.Errorf("the log says %q", test.hush)
				}
				if kept := r.full("1").Flush; kept.Outcome != test.outcome {
					t.Errorf("the journal says %+v", kept)
				}
			})
		})
	}
}

// TestPauseWaits: the record of an outage in a pause stays open, and the status names each
// lossy table next to the pause.
func TestPauseWaits(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{journal: dir})
		r.pause(time.Hour)
		flushed := time.Now()
		r.flushNat()
		must(t, r.fake.Flush(rules.IPv6, rules.Filter, ""))
		r.after(time.Minute)
		r.wantWaiting(api.WaitingPaused, flushed)
		r.wantNotReady("ipv4 nat is emptied, ipv6 filter is emptied; replays are paused until ")
		r.stop()
		if earlier := run(t, r.fake, setup{journal: dir}).d; true {
			r.after(time.Second)
			for _, f := range earlier.Status().Flushes {
				if f.Earlier && (f.Outcome != api.Interrupted || f.Open()) {
					t.Errorf("after a restart the record is %+v", f)
				}
			}
		}
	})
}
