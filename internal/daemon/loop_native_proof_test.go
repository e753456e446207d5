package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/reload"
)

// TestNativeProofFails: the kernel takes a replay, and the read after it fails. The rules still
// count as canaryd's: the record has the time of the write, and the flows that began in the gap
// end.
func TestNativeProofFails(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(r *rig, k *fakeNative, breaks func())
		want int // sweeps of flows
	}{
		{"a replay", func(_ *rig, k *fakeNative, breaks func()) {
			k.between = breaks
			k.flushRuleset()
		}, 1},
		{"a ride with iptables' tables", func(r *rig, k *fakeNative, breaks func()) {
			k.committed = breaks
			r.flushBoth(k)
		}, 3}, // two are of iptables' tables
	} {
		t.Run(test.name, func(t *testing.T) {
			type said struct {
				Outcome string
				Written bool
				Sweeps  int
			}
			f := &flows{}
			nativeNode(t, setup{flows: f, guarded: newFakeNative(natTable(proxyTable, "a"))}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(r, k, func() { k.with(func() { k.brokenReads = errNativeBroken }) })
				r.after(time.Second)
				k.with(func() { k.brokenReads = nil })
				r.after(time.Minute)
				k.wantNative(t, natTable(proxyTable, "a"))
				r.wantReady()
				var got said
				for _, flush := range r.d.Status().Flushes {
					if len(flush.Native) > 0 {
						got.Outcome, got.Written = string(flush.Outcome), flush.WrittenSeconds > 0
					}
				}
				for _, since := range f.since {
					if !since.IsZero() {
						got.Sweeps++
					}
				}
				if d := cmp.Diff(said{string(reload.Partial), true, test.want}, got); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
			})
		})
	}
}
