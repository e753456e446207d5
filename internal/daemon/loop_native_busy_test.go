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

// TestNativeLostWhileAnotherIsRefused: a table that the kernel refuses, and whose next try is far,
// does not hide what happens to the others: what is lost of them is back at once, what their owner
// writes is learned, and a second flush of everything is a flush.
func TestNativeLostWhileAnotherIsRefused(t *testing.T) {
	for name, do := range map[string]func(*fakeNative){
		"nft flush ruleset": (*fakeNative).flushRuleset,
		"nft flush table":   func(k *fakeNative) { k.flushTable(dockerTable) },
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refuses[proxyTable] = true })
				k.flushRuleset()
				r.after(10 * time.Second) // the next try comes at growing distances
				newer := tableOf(dockerTable, "newer")
				k.sync(newer)
				r.after(time.Second)
				do(k)
				r.after(200 * time.Millisecond)
				k.wantNative(t, newer)
				r.wantNotReady("ip kube-proxy is table_deleted")
				k.with(func() { clear(k.refuses) })
				r.after(time.Minute)
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				k.wantNative(t, newer)
				r.wantReady()
			})
		})
	}
}
