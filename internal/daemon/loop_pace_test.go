package daemon

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A waitingKernel is a Fake whose reads of IPv4, the written family, take time and some
// processor time. Next to a busy writer such reads wait for its commits, and on a busy machine
// for a processor.
type waitingKernel struct {
	*iptablestest.Fake
	takes, costs time.Duration
	spent        atomic.Int64 // nanoseconds of processor time
}

func (k *waitingKernel) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if f == rules.IPv4 {
		time.Sleep(k.takes)
		k.spent.Add(int64(k.costs))
	}
	return k.Fake.Read(ctx, f)
}

// TestPaceBesideABusyWriter: a process commits 20 times a second. The generation is never older
// than 250 ms while reads are slow but cost little. Costly reads take a tenth of a core.
func TestPaceBesideABusyWriter(t *testing.T) {
	for name, c := range map[string]struct {
		takes, costs  time.Duration
		oldest, spent time.Duration
	}{
		"reads wait":    {30 * time.Millisecond, 3 * time.Millisecond, 250 * time.Millisecond, time.Second},
		"reads compute": {100 * time.Millisecond, 100 * time.Millisecond, 1300 * time.Millisecond, 1100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := &waitingKernel{Fake: loadedFake(t, iptables.NFT), takes: c.takes, costs: c.costs}
				r := run(t, k.Fake, setup{kernel: k, cpu: func() time.Duration { return time.Duration(k.spent.Load()) }})
				r.after(time.Minute)
				r.wantReady()
				const busy = 10 * time.Second
				spent, last, id, oldest := k.spent.Load(), time.Now(), "", time.Duration(0)
				for n := range int(busy / (50 * time.Millisecond)) {
					r.endpoint(n, true)
					for range 10 {
						r.after(5 * time.Millisecond)
						oldest = max(oldest, time.Since(last))
						if now := r.d.Status().Generation.ID; now != id {
							id, last = now, time.Now()
						}
					}
				}
				if oldest > c.oldest {
					t.Errorf("the longest time without a new generation was %s, want at most %s", oldest, c.oldest)
				}
				if used := time.Duration(k.spent.Load() - spent); used > c.spent {
					t.Errorf("reads took %s of a processor in %s, want at most %s", used, busy, c.spent)
				}
			})
		})
	}
}
