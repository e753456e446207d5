package daemon

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTidy: canaryd returns memory once after the start and once after a burst. It does so
// neither during the burst nor more than twice a minute, and never while nothing happens.
func TestTidy(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		var memoryFreed atomic.Int64
		r := start(t, backend, setup{freeMemory: func() { memoryFreed.Add(1) }})
		want := func(n int64, when string) {
			t.Helper()
			if got := memoryFreed.Load(); got != n {
				t.Errorf("%s memory was given back %d times, want %d", when, got, n)
			}
		}
		r.after(10 * time.Second)
		want(1, "after the start")
		r.after(10 * time.Minute)
		want(1, "after ten idle minutes")
		for range 100 {
			must(t, r.programs().RestoreNoflush(t.Context(), rules.IPv4, scenario.NewService))
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
			r.after(time.Second)
		}
		want(1, "while writers are at work")
		r.after(time.Minute)
		want(2, "after they stopped")
		for range 10 {
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
			r.after(6 * time.Second)
		}
		if got := memoryFreed.Load(); got < 3 || got > 5 {
			t.Errorf("beside a flush every 6 s memory was given back %d times in a minute, want twice", got-2)
		}
	})
}
