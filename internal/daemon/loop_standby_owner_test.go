package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
)

// TestNativeStandbyBeforeItsOwner: a gate is open while canaryd waits for the flusher, and the
// owner writes its table meanwhile. The flush has no record, and the log says how the open gate
// ended.
func TestNativeStandbyBeforeItsOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		records, heals := len(r.d.Status().Flushes), k.count().heals
		k.flushRuleset()
		r.after(5 * time.Millisecond)
		r.wantNativeStandby(s, api.StandbyOpen)
		k.again(natTable(proxyTable, "a", "z"))
		k.again(tableOf(dockerTable, "c"))
		r.after(5 * time.Second)
		r.wantReady()
		r.wantNativeStandby(s, api.StandbyArmed)
		if n := len(r.d.Status().Flushes) - records; n != 0 || k.count().heals > heals {
			t.Fatalf("%d records and %d replays", n, k.count().heals-heals)
		}
		if diff := native.Diff(natTable(proxyTable, "a", "z"), s.holds(proxyTable)); len(diff) > 0 {
			t.Errorf("the copy is not what the owner wrote: %v", diff)
		}
		r.wantLog("canaryd read the tables again and found nothing missing")
		r.wantLog("translated by the standby (table ip kube-proxy) after")
	})
}
