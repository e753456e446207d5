package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// askNatively requests a restore and returns the outcome of each native table.
func (r *rig) askNatively(dry bool) map[string]api.Outcome {
	r.t.Helper()
	reply, err := r.d.Restore(r.t.Context(), api.RestoreRequest{DryRun: dry})
	must(r.t, err)
	got := map[string]api.Outcome{}
	for _, row := range reply.Native {
		got[row.Table] = row.Outcome
	}
	return got
}

// wantNativeAwaiting fails unless the tables of those names, and no others, wait for a decision.
func (r *rig) wantNativeAwaiting(want ...string) {
	r.t.Helper()
	var got []string
	for _, t := range r.d.Status().Native {
		if t.Awaiting {
			got = append(got, t.Table)
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("tables that wait for a decision (-want +got):\n%s", d)
	}
}

// TestNativeRestoreOfTwo: an operator requests two tables, and canaryd can restore only one.
// The reply says so, and canaryd guards that one again.
func TestNativeRestoreOfTwo(t *testing.T) {
	for _, test := range []struct {
		name     string
		do       func(k *fakeNative)
		want     map[string]api.Outcome
		awaiting []string
	}{
		{"the kernel refuses the other", func(k *fakeNative) { k.alone, k.refuses[dockerTable] = true, true },
			map[string]api.Outcome{"ip kube-proxy": reload.Proved, "ip docker-bridges": reload.Failed}, []string{"ip docker-bridges"}},
		{"its owner writes the other", func(k *fakeNative) { k.between = func() { k.again(tableOf(dockerTable, "z")) } },
			map[string]api.Outcome{"ip kube-proxy": reload.Proved, "ip docker-bridges": reload.Skipped}, nil},
		{"devices are missing", func(k *fakeNative) { k.lacking = []string{"eth9"} },
			map[string]api.Outcome{"ip kube-proxy": reload.Partial, "ip docker-bridges": reload.Partial}, nil},
		{"the proof fails", func(k *fakeNative) {
			k.between = func() { k.with(func() { k.brokenReads = errNativeBroken }) }
		}, map[string]api.Outcome{"ip kube-proxy": reload.Failed, "ip docker-bridges": reload.Failed}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.deleteTable(proxyTable)
				k.deleteTable(dockerTable)
				r.settled()
				r.wantNativeAwaiting("ip docker-bridges", "ip kube-proxy")
				k.with(func() { test.do(k) })
				if d := cmp.Diff(test.want, r.askNatively(false)); d != "" {
					t.Errorf("the reply (-want +got):\n%s", d)
				}
				k.with(func() { k.brokenReads, k.lacking = nil, nil })
				r.after(time.Minute)
				r.wantNativeAwaiting(test.awaiting...)
				for _, f := range r.d.Status().Flushes {
					if want, of := test.want[f.Native[0].Table], f.Native[0].Table; want != reload.Failed && f.Outcome != want {
						t.Errorf("the record of %s ends %s, want %s", of, f.Outcome, want)
					}
				}
				k.flushRuleset()
				r.settled()
				if k.standing(proxyTable) == nil {
					t.Error("what came back is not put back after the next flush")
				}
			})
		})
	}
}

// TestNativeRestoreEndsStale: a restore found and recorded a loss, and could not write because
// other processes kept writing. The loop takes over.
func TestNativeRestoreEndsStale(t *testing.T) {
	nativeNode(t, setup{deaf: true}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.after, k.stale = func() { k.deleteTable(dockerTable) }, -1 })
		k.deleteTable(proxyTable)
		want := map[string]api.Outcome{"ip kube-proxy": reload.Failed, "ip docker-bridges": reload.Failed}
		if d := cmp.Diff(want, r.askNatively(false)); d != "" {
			t.Errorf("the reply (-want +got):\n%s", d)
		}
		k.with(func() { k.stale = 0 })
		k.again(tableOf(proxyTable, "a", "b"))
		k.again(tableOf(dockerTable, "d"))
		r.after(time.Minute)
		r.wantReady()
		k.flushRuleset()
		r.after(time.Minute)
		k.wantNative(t, tableOf(dockerTable, "d"))
	})
}

// TestNativeDryRestoreFirst: a dry run reads the tables before the loop could. The loop
// restores them anyway.
func TestNativeDryRestoreFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, store := newFakeNative(tableOf(proxyTable, "a", "b")), nativestore.New(t.TempDir(), nativestore.Identity{})
		r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store})
		time.Sleep(time.Minute)
		r.stop()
		k.flushTable(proxyTable)
		k.with(func() { k.brokenReads, k.unheard = errNativeBroken, nil }) // while canaryd was down
		r = run(t, r.fake, setup{guarded: k, nativeStore: store})
		r.settled()
		k.with(func() { k.brokenReads = nil })
		r.restoreNatively(true, restoredRow("", ""))
		if k.count().heals != 0 {
			t.Error("a dry run wrote")
		}
		r.after(time.Minute)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		r.wantReady()
	})
}

// TestNativeRestoreStoredDevices: a restore without a daemon also leaves out the devices that
// the node lacks, and the reply names them.
func TestNativeRestoreStoredDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k, store := newFakeNative(tableOf(proxyTable, "a", "b")), nativestore.New(t.TempDir(), nativestore.Identity{})
		r := start(t, iptables.NFT, setup{guarded: k, nativeStore: store})
		time.Sleep(time.Minute)
		r.stop()
		k.flushRuleset()
		k.with(func() { k.lacking = []string{"eth9"} })
		got, err := store.RestoreStored(k, func(tableid.TableID) bool { return true }, false, nil)
		must(t, err)
		if d := cmp.Diff(restoredRow(reload.Partial, "network devices that the node lacks were left out: eth9"), got); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}
