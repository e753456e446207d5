package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TestNativeOwnerWritesAfterReplay: an owner that writes between the write and its proof has the
// last word, and the loss is over.
func TestNativeOwnerWritesAfterReplay(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.between = func() { k.sync(tableOf(proxyTable, "a", "newer")) }
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "newer"))
		r.wantReady()
		f := r.wantOneFlush("table_deleted", reload.Proved)
		if absent := api.Seconds(f.AbsentSeconds); absent > 50*time.Millisecond || k.count().heals != 1 {
			t.Errorf("absent for %s in %d replays, want the 20 ms of settling and little more, in one", absent, k.count().heals)
		}
	})
}

// TestNativeFlushedWhileUnread: a loss begins with the commit that took the rules, and not with
// what the owner had written before and canaryd had not read yet.
func TestNativeFlushedWhileUnread(t *testing.T) {
	for name, do := range map[string]func(*fakeNative){
		"nft flush ruleset": (*fakeNative).flushRuleset,
		"nft flush table":   func(k *fakeNative) { k.flushTable(proxyTable) },
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.sync(tableOf(proxyTable, "a", "b", "new"))
				r.after(captureQuiet / 2)
				flushed := time.Now()
				do(k)
				r.settled()
				f := r.records(0)[0]
				if f.Time.Before(flushed) || f.Outcome != reload.Proved {
					t.Errorf("the loss begins %s before the flush: %+v", flushed.Sub(f.Time), f)
				}
			})
		})
	}
}
