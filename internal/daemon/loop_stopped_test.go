package daemon

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A cutKernel is a kernel whose next probe or read is interrupted by the end of the run.
type cutKernel struct {
	*iptablestest.Fake
	probe, read atomic.Pointer[func()]
}

// cut ends the run, and returns the error that interrupts a step. Without an armed end it
// returns nil.
func cut(ctx context.Context, end *atomic.Pointer[func()]) error {
	if do := end.Swap(nil); do != nil {
		go (*do)() // waits for the end of the run
		<-ctx.Done()
	}
	return ctx.Err()
}

func (k *cutKernel) Probe(ctx context.Context, f rules.Family, places []iptables.Place) (iptables.Probed, error) {
	if err := cut(ctx, &k.probe); err != nil {
		return iptables.Probed{}, err
	}
	return k.Fake.Probe(ctx, f, places)
}

func (k *cutKernel) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if err := cut(ctx, &k.read); err != nil {
		return iptables.Snapshot{}, err
	}
	return k.Fake.Read(ctx, f)
}

// TestStoppedInTheMiddleOfALook: canaryd is stopped within a second of its start, during a
// probe or a read. The generation is on disk anyway, and the next run restores the rules that
// were flushed meanwhile.
func TestStoppedInTheMiddleOfALook(t *testing.T) {
	for name, of := range map[string]func(*cutKernel) *atomic.Pointer[func()]{
		"probe": func(k *cutKernel) *atomic.Pointer[func()] { return &k.probe },
		"read":  func(k *cutKernel) *atomic.Pointer[func()] { return &k.read },
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, id := t.TempDir(), identity(backend)
				k := &cutKernel{Fake: loadedFake(t, backend)}
				r := run(t, k.Fake, setup{kernel: k, store: openStore(t, dir, id)})
				r.after(300 * time.Millisecond)
				generation := r.d.Status().Generation.ID
				end := r.stop
				of(k).Store(&end)
				must(t, k.RestoreNoflush(rules.IPv4, "*filter\n-A OUTPUT -s 192.0.2.9/32 -j RETURN\nCOMMIT\n"))
				r.after(5 * time.Second)
				if of(k).Load() != nil {
					t.Fatal("it was not stopped")
				}
				before := r.tables()
				r.flushNat()
				left := r.tables()
				next := run(t, k.Fake, setup{store: openStore(t, dir, id)})
				next.settled()
				next.wantLog("Took up the stored generation")
				if got := next.d.Status().Generation.ID; got != generation {
					t.Errorf("the generation is %s, was %s", got, generation)
				}
				next.wantBack(before, left)
			})
		})
	}
}
