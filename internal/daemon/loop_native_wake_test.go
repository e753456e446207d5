package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestNativeAsleep: while no table exists that --protect names, canaryd lists tables now and
// then. It neither listens to commits nor reads nor writes. Once such a table exists, canaryd
// guards it.
func TestNativeAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newFakeNative()
		r := start(t, iptables.NFT, setup{guarded: k, asleep: true})
		r.wantReady()
		r.after(time.Minute)
		k.with(func() {
			if k.open || k.captures != 0 || len(k.witness) != 0 {
				t.Errorf("open %t, %d reads, witnesses %v; want none of it", k.open, k.captures, k.witness)
			}
		})
		asks := k.asked()
		for range 1000 { // a busy owner of iptables' rules
			k.commit(false, func(func(tableid.TableID) *native.Deed, *native.Commit) {})
			time.Sleep(time.Millisecond)
		}
		if n := k.asked() - asks; n == 0 || n > 6 {
			t.Errorf("it was asked %d times in a second of commits, want four or so", n)
		}

		k.again(tableOf(proxyTable, "a", "b"))
		r.after(time.Second)
		if s := r.d.Status().Native; len(s) != 1 || k.count().witness == "" {
			t.Fatalf("guarded: %+v, the witness is %q", s, k.count().witness)
		}
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Proved)
	})
}

// TestNativeAsleepUnknown: the kernel cannot list the tables, or commits keep interrupting its
// answer. The node is not healthy.
func TestNativeAsleepUnknown(t *testing.T) {
	for _, err := range []error{errNativeBroken, nft.ErrInterrupted} {
		t.Run(err.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newFakeNative()
				r := start(t, iptables.NFT, setup{guarded: k, asleep: true})
				k.breakDown(err)
				r.after(time.Minute)
				r.wantNotReady("native tables are unknown")
				k.breakDown(nil)
				r.after(time.Minute)
				r.wantReady()
			})
		})
	}
}

// TestNativeAsleepRestart: canaryd restores tables that an earlier run guarded, although none
// exists.
func TestNativeAsleepRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := nativestore.New(t.TempDir(), nativestore.Identity{})
		k := newFakeNative(tableOf(proxyTable, "a", "b"))
		r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store, asleep: true})
		r.settled()
		r.stop()
		k.flushRuleset()
		k.with(func() { k.open = false })
		time.Sleep(time.Minute)
		next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k, nativeStore: store, asleep: true})
		next.settled()
		next.wantReady()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
	})
}

func (k *fakeNative) asked() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asks
}
