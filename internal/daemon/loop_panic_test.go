package daemon

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// brokenKernel panics in a step.
type brokenKernel struct{ Kernel }

func (brokenKernel) Stamp(context.Context, rules.Family) (iptables.Stamp, error) { panic("a fault") }

// TestAPanicEndsCanaryd: a panic in a step ends Run, and so the process, which systemd or
// kubelet restarts. Goroutines in the background delay the end no longer than they need.
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
		defer cancel() // or the bubble would wait for Run's goroutines
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
