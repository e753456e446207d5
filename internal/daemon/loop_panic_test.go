package daemon

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// brokenKernel has a fault that ends a step.
type brokenKernel struct{ Kernel }

func (brokenKernel) Stamp(context.Context, rules.Family) (iptables.Stamp, error) { panic("a fault") }

// TestAPanicEndsCanaryd: a fault in a step ends Run, and with it the process, which systemd or
// kubelet starts again. What runs in the background keeps it from that no longer than it needs.
func TestAPanicEndsCanaryd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		r.settled()
		r.stop()

		cfg := r.d.cfg
		cfg.Kernel = brokenKernel{cfg.Kernel}
		d := New(cfg)
		ended := make(chan any, 1)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel() // or the bubble would wait where Run does
		go func() {
			defer func() { ended <- recover() }()
			_ = d.Run(ctx)
		}()
		select {
		case fault := <-ended:
			if fault != "a fault" {
				t.Errorf("Run ended with %v, want the fault of the step", fault)
			}
		case <-time.After(time.Hour):
			t.Error("Run did not end within an hour of the fault")
		}
	})
}
