package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestModeIsExported: canaryd_mode is 1 for the present mode, also after canaryd has switched
// to observe mode by itself.
func TestModeIsExported(t *testing.T) {
	want := func(r *rig, mode api.Mode) {
		r.t.Helper()
		if diff := cmp.Diff(series{"mode{mode=" + string(mode) + "}": 1}, r.metrics("mode")); diff != "" {
			r.t.Errorf("canaryd_mode (-want +got):\n%s", diff)
		}
	}
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		want(start(t, backend, setup{}), api.Heal)
		want(start(t, backend, setup{mode: api.Observe}), api.Observe)
		displaced := run(t, loadedFake(t, backend), setup{declared: small(t)}) // next to kube-proxy
		displaced.after(time.Minute)
		want(displaced, api.Observe)
	})
}
