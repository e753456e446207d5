package daemon

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An unsure kernel writes as requested, and once answers with an error.
type unsure struct {
	*iptablestest.Fake
	armed atomic.Bool
	at    bool // the error still says that everything was written
}

func (k *unsure) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := k.Fake.Begin(ctx)
	return unsureSession{s, k}, err
}

type unsureSession struct {
	iptables.Session
	kernel *unsure
}

func (s unsureSession) Restore(ctx context.Context, p ...iptables.Payload) map[rules.Family]iptables.Written {
	all := s.Session.Restore(ctx, p...)
	if s.kernel.armed.Swap(false) {
		for f, w := range all {
			if w.Err = errInjected; s.kernel.at {
				w.At = time.Now()
			}
			all[f] = w
		}
	}
	return all
}

// TestDrillIsUnsure: a write of a drill ends in an error, and may have taken everything. The
// drill is not called refused, its takings are recorded as the drill's, and it has not passed
// after a restart either.
func TestDrillIsUnsure(t *testing.T) {
	for _, test := range []struct {
		name    string
		request api.DrillRequest
		at      bool
		sort    api.DrillSort
		result  api.DrillResult
		flushes float64
	}{
		{"the canary may be gone", api.DrillRequest{}, false, api.DrillCanary, api.DrillFailed, 0},
		{"the canary is gone", api.DrillRequest{}, true, api.DrillCanary, api.DrillPassed, 0},
		{"jumps may be gone", api.DrillRequest{ForReal: true}, false, api.DrillForReal, api.DrillFailed, 1},
		{"jumps are gone", api.DrillRequest{ForReal: true}, true, api.DrillForReal, api.DrillPassed, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				k := &unsure{Fake: loadedFake(t, backend), at: test.at}
				r := run(t, k.Fake, setup{kernel: k, store: openStore(t, dir, identity(backend)), journal: dir})
				r.settled()
				before := r.tables()
				k.armed.Store(true)
				reply := r.drill(test.request)
				if reply.Result != test.result || strings.Contains(r.log.String(), "nothing was taken") {
					t.Errorf("the reply: %+v", reply)
				}
				if line := linesOf(r.log.String(), "A drill failed: its write failed and may have removed parts"); (line != "") != (test.result == api.DrillFailed) {
					t.Errorf("the log says %q", line)
				}
				r.after(20 * time.Second)
				r.wantReady()
				r.wantBack(before, before)
				failed := test.result == api.DrillFailed
				if record := r.oneRecord(); record.Drill != test.sort || record.DrillFailed != failed || record.ByText() != "canaryd drill" {
					t.Errorf("the record: %+v", record)
				}
				if n := r.metrics("flush_events")["flush_events_total"]; n != test.flushes {
					t.Errorf("%v flushes", n)
				}
				r.stop()
				r.after(time.Second)
				next := run(t, k.Fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
				next.settled()
				if s := next.d.Status(); s.LastDrill == nil || s.LastDrill.Result != test.result {
					t.Errorf("the last drill after a restart: %+v", s.LastDrill)
				}
			})
		})
	}
}

// TestFlushInAFailedDrill: a flush happens while a drill fails. The record is a flush's, and
// the drill is void.
func TestFlushInAFailedDrill(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		end := r.drillAside(api.DrillRequest{})
		r.fake.FailRestores(-1, iptables.ReasonOther)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		if reply := end(); reply.Result != api.DrillVoid || !strings.Contains(reply.Reason, "another process flushed rules meanwhile") {
			t.Errorf("the reply: %+v", reply)
		}
		r.fake.FailRestores(0, "")
		r.after(time.Minute)
		r.wantReady()
		if record := r.oneRecord(); record.Drill != "" || record.DrillFailed {
			t.Errorf("the record: %+v", record)
		}
	})
}

// TestDrillIsRefusedByIptables: iptables-restore refuses the write of a drill. It took nothing,
// so the drill is refused, and not failed.
func TestDrillIsRefusedByIptables(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.settled()
		r.fake.FailRestores(-1, iptables.ReasonParse)
		if reply := r.drill(api.DrillRequest{ForReal: true}); reply.Result != api.DrillRefused || reply.Jumps > 0 || !strings.Contains(reply.Reason, "injected fault") {
			t.Errorf("the reply: %+v", reply)
		}
		r.fake.FailRestores(0, "")
		r.settled()
		r.wantReady()
		if s := r.d.Status(); s.LastDrill != nil || len(s.Flushes) > 0 {
			t.Errorf("the last drill: %+v, the records: %+v", s.LastDrill, s.Flushes)
		}
	})
}
