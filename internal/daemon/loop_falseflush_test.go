package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestOwnWriteWithoutProof: marks are renewed, but what came of it cannot be
// read, as when the kernel kills iptables-save for want of memory. Nobody
// flushed anything.
func TestOwnWriteWithoutProof(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		moved := r.moved(func() {
			restores := r.fake.Restores()
			r.fake.BeforeRestore(func() { r.fake.FailReads(errInjected) })
			must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
			r.after(5 * time.Second)
			if r.fake.Restores() == restores {
				t.Error("the marks were not renewed")
			}
			r.wantNotReady("unknown")
			r.fake.BeforeRestore(nil)
			r.fake.FailReads(nil)
			r.after(20 * time.Second)
		}, lossMetrics...)
		wantMoved(t, moved, series{})
		if records := r.records(0); len(records) != 0 {
			t.Errorf("flush records: %+v", records)
		}
		r.wantReady()
	})
}
