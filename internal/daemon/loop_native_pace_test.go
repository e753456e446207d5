package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// A slowRead is the time for a read of 1,000 services (Linux 6.18).
const slowRead = 400 * time.Millisecond

// TestNativeFlushedRightAfterRead: a slow read does not delay the read that a flush needs. The
// slow one may be the first, one after missed commits, or one for an owner's deed that looks
// like a flush.
func TestNativeFlushedRightAfterRead(t *testing.T) {
	for name, before := range map[string]func(k *fakeNative){
		"the first read of a table":  func(k *fakeNative) { k.again(tableOf(proxyTable.Family.Table("later"), "x")) },
		"an owner's change":          func(k *fakeNative) { k.sync(tableOf(dockerTable, "d")) },
		"missed commits":             func(k *fakeNative) { k.miss(); k.sync(tableOf(dockerTable, "d")) },
		"an owner that takes a rule": func(k *fakeNative) { k.removeRule(proxyTable) },
	} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(time.Minute)
				k.with(func() { k.takes = slowRead })
				before(k)
				r.after(captureMost + slowRead + 10*time.Millisecond)
				k.with(func() { k.takes = 0 })
				k.flushTable(proxyTable)
				r.settled()
				f := r.wantOneFlush("emptied", reload.Proved)
				if noticed := api.Seconds(f.NoticedSeconds); noticed > 10*time.Millisecond {
					t.Errorf("the flush was noticed after %s", noticed)
				}
				want := tableOf(proxyTable, "a", "b")
				if name == "an owner that takes a rule" {
					want = tableOf(proxyTable, "a")
				}
				k.wantNative(t, want)
			})
		})
	}
}

// TestNativeLearnedRightAfterStart: canaryd learns a change right after its start at once,
// however long the first read took. That was 1.4 s at 5,000 services, and a change then waited
// for 13 s.
func TestNativeLearnedRightAfterStart(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.stop()
		k.with(func() { k.takes = slowRead })
		next := run(t, loadedFake(t, iptables.NFT), setup{guarded: k})
		next.settled()
		k.with(func() { k.takes = 0 })
		generation := func() string {
			all := next.d.Status().Native
			return all[slices.IndexFunc(all, func(s api.NativeTable) bool { return s.Table == proxyTable.NFT() })].Generation
		}
		before := generation()
		k.sync(tableOf(proxyTable, "a", "b", "n"))
		next.after(2 * captureQuiet)
		if generation() == before {
			t.Error("the change is not learned")
		}
	})
}

// TestNativeFalseAlarmsArePaced: an owner keeps doing deeds that look like a flush, and the
// table must be read each time. That costs a fifth of a core at most.
func TestNativeFalseAlarmsArePaced(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(time.Minute)
		const takes = 50 * time.Millisecond
		k.with(func() { k.takes = takes })
		var before, after int
		k.with(func() { before = k.follows })
		const long = time.Minute
		for range long / (20 * time.Millisecond) {
			k.again(tableOf(dockerTable, "c"))
			r.after(20 * time.Millisecond)
		}
		k.with(func() { after = k.follows; k.takes = 0 })
		if used := time.Duration(after-before) * takes; used > long/5+2*takes || used < long/20 {
			t.Errorf("%d reads in %s take %s", after-before, long, used)
		}
		k.flushTable(proxyTable)
		r.settled()
		r.wantOneFlush("emptied", reload.Proved)
	})
}

// TestNativeReadsThatWait: reads take 2 s and no processor time, because the machine is busy. They
// do not delay the read that a flush needs by nine times that.
func TestNativeReadsThatWait(t *testing.T) {
	nativeNode(t, setup{cpu: func() time.Duration { return 0 }}, func(t *testing.T, r *rig, k *fakeNative) {
		const takes = 2 * time.Second
		k.with(func() { k.takes = takes })
		for range 2 { // the first one may overdraw
			k.again(tableOf(dockerTable, "c"))
			r.after(2 * takes)
		}
		k.with(func() { k.takes = 0 })
		k.flushTable(proxyTable)
		r.after(time.Minute)
		f := r.wantOneFlush("emptied", reload.Proved)
		if noticed := api.Seconds(f.NoticedSeconds); noticed > 10*time.Millisecond {
			t.Errorf("the flush was noticed after %s", noticed)
		}
	})
}

// TestNativeBrokenAndGone: tables are gone, and the kernel answers no read. canaryd does not
// read without a pause.
func TestNativeBrokenAndGone(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenReads = errNativeBroken })
		k.flushRuleset()
		var before, after int
		k.with(func() { before = k.captures })
		r.after(time.Minute)
		k.with(func() { after = k.captures })
		if n := after - before; n > 200 {
			t.Errorf("%d reads in a minute in which the kernel answers none", n)
		}
		r.wantNotReady("native tables are unknown")
		k.with(func() { k.brokenReads = nil })
		r.after(time.Minute)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
	})
}
