package daemon

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TestNativeOwnerWritesAfterReplay: an owner writes between canaryd's write and its proof. The
// owner has the last word, and the loss is over.
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

// TestNativeOwnerWritesAfterCostlyReplay: an owner writes before a replay is proved. That
// undoes nothing, even if the last replays cost so much that the next one must wait.
func TestNativeOwnerWritesAfterCostlyReplay(t *testing.T) {
	var used atomic.Int64
	costly := func() time.Duration { return time.Duration(used.Add(int64(5 * time.Second))) }
	nativeNode(t, setup{cpu: costly}, func(t *testing.T, r *rig, k *fakeNative) {
		k.flushRuleset()
		r.settled()
		k.between = func() { k.sync(tableOf(proxyTable, "a", "newer")) }
		k.flushRuleset()
		r.settled()
		if r.d.Status().Contended || r.logged("keeps undoing the replays") > 0 {
			t.Error("an owner's write is called a contention")
		}
		r.after(20 * time.Second)
		k.wantNative(t, tableOf(proxyTable, "a", "newer"))
		r.wantReady()
		if f := r.d.Status().Flushes[0]; api.Seconds(f.AbsentSeconds) < time.Second {
			t.Errorf("nothing waited for the limit, so this shows nothing: %+v", f)
		}
	})
}

// TestNativeFlushedWhileUnread: a loss begins with the commit that took the rules, and not with
// an earlier, still unread write of the owner.
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

// TestNativeLostWhileAnotherIsRefused: the kernel refuses a table, and its next try is far.
// canaryd restores losses of other tables at once and learns their owners' writes. A second
// flush of everything is a flush.
func TestNativeLostWhileAnotherIsRefused(t *testing.T) {
	for name, do := range map[string]func(*fakeNative){
		"nft flush ruleset": (*fakeNative).flushRuleset,
		"nft flush table":   func(k *fakeNative) { k.flushTable(dockerTable) },
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.refuses[proxyTable] = true })
				k.flushRuleset()
				r.after(10 * time.Second) // the tries have growing distances
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
