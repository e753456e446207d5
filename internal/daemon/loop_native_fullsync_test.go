package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TestRequestsFullSync: kube-proxy's first commit after a replay is of a full sync, which may have
// begun before it. canaryd requests another one, and keeps the chain for that over a flush until
// kube-proxy deletes it. Other commits, other owners, and a full sync without a replay are no
// reason.
func TestRequestsFullSync(t *testing.T) {
	flushed := func(_ *rig, k *fakeNative) { k.flushRuleset() }
	for _, test := range []struct {
		name  string
		flush func(*rig, *fakeNative)
		syncs func(*rig, *fakeNative)
		wants bool
	}{
		{"a full sync", flushed, func(_ *rig, k *fakeNative) { k.fullSync(proxyTable) }, true},
		{"a full sync, commits missed", flushed, func(_ *rig, k *fakeNative) { k.missing(func() { k.fullSync(proxyTable) }) }, true},
		{"a full sync in a pause", flushed, func(r *rig, k *fakeNative) {
			r.pause(time.Minute)
			k.fullSync(proxyTable)
			r.after(2 * time.Minute)
		}, true},
		{"a partial sync, then a full one", flushed, func(r *rig, k *fakeNative) {
			k.sync(tableOf(proxyTable, "a", "b", "c"))
			r.settled()
			k.fullSync(proxyTable)
		}, false},
		{"another owner", flushed, func(_ *rig, k *fakeNative) { k.fullSync(dockerTable) }, false},
		{"the kernel refused the table, and took another one", func(_ *rig, k *fakeNative) {
			k.with(func() { k.refuses[proxyTable] = true })
			k.flushTable(dockerTable)
			k.flushTable(proxyTable)
		}, func(_ *rig, k *fakeNative) { k.fullSync(proxyTable) }, false},
		{"no flush", func(*rig, *fakeNative) {}, func(_ *rig, k *fakeNative) { k.fullSync(proxyTable) }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.flush(r, k)
				r.settled()
				test.syncs(r, k)
				r.settled()
				requested := func() bool {
					return slices.ContainsFunc(k.standing(proxyTable).Chains, func(c native.Chain) bool { return c.Name == native.SyncChain })
				}
				if requested() != test.wants || strings.Contains(r.log.String(), "makes it do a full sync") != test.wants {
					t.Errorf("a full sync was requested: %t, want %t", requested(), test.wants)
				}
				if !test.wants {
					return
				}
				k.flushRuleset()
				r.settled()
				if !requested() {
					t.Error("a second flush took the request")
				}
				k.removeNamed(proxyTable, func(chain string) bool { return chain == native.SyncChain }, nil, nil)
				r.after(5 * time.Second)
				k.flushRuleset()
				r.settled()
				if list := r.d.Status().Flushes; requested() || len(list) != 3 || list[0].Outcome != reload.Proved {
					t.Errorf("kube-proxy's deletion is not learned: requested %t, records %+v", requested(), list)
				}
			})
		})
	}
}
