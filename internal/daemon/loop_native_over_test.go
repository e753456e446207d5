package daemon

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
)

// nativeEnds returns the outcome of each record by the names of its tables, with a comma after
// each.
func (r *rig) nativeEnds() map[string]api.Outcome {
	got := map[string]api.Outcome{}
	for _, f := range r.d.Status().Flushes {
		name := ""
		for _, l := range f.Native {
			name += l.Table + ","
		}
		got[name] = f.Outcome
	}
	return got
}

// TestNativeOwnerEndsTheLoss: canaryd restores nothing, and the owner of one table writes it
// again right before canaryd plans another one. The first table's record ends then, and the
// other table has its own.
func TestNativeOwnerEndsTheLoss(t *testing.T) {
	restore := func(dry bool) func(r *rig, k *fakeNative) {
		return func(r *rig, k *fakeNative) {
			_, err := r.d.Pause(r.t.Context(), api.PauseRequest{Seconds: 3600})
			must(r.t, err)
			k.deleteTable(proxyTable)
			r.settled()
			k.flushTable(dockerTable)
			r.settled()
			k.sync(tableOf(dockerTable, "newer"))
			r.askNatively(dry)
		}
	}
	for _, test := range []struct {
		name string
		mode api.Mode
		do   func(r *rig, k *fakeNative)
		want map[string]api.Outcome
	}{
		{"observe mode, and a flush of another table", api.Observe, func(r *rig, k *fakeNative) {
			k.flushTable(dockerTable)
			r.settled()
			k.flushTable(proxyTable)
			r.after(5 * time.Millisecond) // the heal waits for quiet
			k.again(tableOf(dockerTable, "newer"))
		}, map[string]api.Outcome{"ip docker-bridges,": reload.Skipped, "ip kube-proxy,": api.WaitingObserve}},
		{"a pause, and a restore of another table", api.Heal, restore(false),
			map[string]api.Outcome{"ip docker-bridges,": reload.Skipped, "ip kube-proxy,": reload.Proved}},
		{"a pause, and a dry run", api.Heal, restore(true),
			map[string]api.Outcome{"ip docker-bridges,": reload.Skipped, "ip kube-proxy,": api.AwaitingDecision}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{mode: test.mode}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(r, k)
				r.settled()
				if d := cmp.Diff(test.want, r.nativeEnds()); d != "" {
					t.Errorf("what the records end with (-want +got):\n%s", d)
				}
				k.wantNative(t, tableOf(dockerTable, "newer"))
			})
		})
	}
}
