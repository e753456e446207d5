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

// An unsure kernel writes what it is asked to, and once answers with an error.
type unsure struct {
	*iptablestest.Fake
	armed atomic.Bool
	at    bool // the error comes after it is known that all was written
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

// TestDrillIsUnsure: a drill whose write ends in an error may have taken the canary all the same.
// It is not called refused, and what it took is no flush.
func TestDrillIsUnsure(t *testing.T) {
	for _, test := range []struct {
		name   string
		at     bool
		result api.DrillResult
	}{{"the write may have been done", false, api.DrillFailed}, {"the write was done", true, api.DrillPassed}} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				k := &unsure{Fake: loadedFake(t, backend), at: test.at}
				r := run(t, k.Fake, setup{kernel: k})
				r.settled()
				before := r.tables()
				k.armed.Store(true)
				reply := r.drill(api.DrillRequest{})
				if reply.Result != test.result || strings.Contains(r.log.String(), "nothing was taken") {
					t.Errorf("the reply: %+v", reply)
				}
				r.after(20 * time.Second)
				r.wantReady()
				r.wantBack(before, before)
				if record := r.oneRecord(); record.Drill != api.DrillCanary || record.Lost.Rules != 0 {
					t.Errorf("the record: %+v", record)
				}
				if n := r.metrics("flush_events")["flush_events_total"]; n != 0 {
					t.Errorf("%v flushes", n)
				}
			})
		})
	}
}
