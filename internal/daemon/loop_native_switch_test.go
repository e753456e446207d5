package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestNativeSwitchedMode: kube-proxy that is started in iptables mode deletes its native table and
// then writes its canary and its rules. That is its decision. A canary that stood before says
// nothing.
func TestNativeSwitchedMode(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]", "-X KUBE-PROXY-CANARY")
		r.settled()
		k.deleteTable(proxyTable)
		r.settled()
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.after(time.Minute)
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
		r.after(10 * time.Second)
		r.wantReady()
		if k.standing(proxyTable) != nil || k.count().heals != 0 {
			t.Error("the table was put back")
		}
		r.wantOneFlush("deleted_by_owner_or_unknown", api.OwnersDecision)
	})
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
		r.after(10 * time.Second)
		k.deleteTable(proxyTable)
		r.after(time.Minute)
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision)
	})
}

// TestNativeDeletedByAnOwnerThatWasNotRead: nft had ended before it could be read. A process of
// kube-proxy's next to it that has started since the table was written was started to remove it, or
// will write it again. The one that wrote the table, and other programs, say nothing.
func TestNativeDeletedByAnOwnerThatWasNotRead(t *testing.T) {
	for _, test := range []struct {
		name      string
		neighbour watch.Neighbour
		since     time.Duration // how long before the deletion it had started
		owner     bool
	}{
		{"kube-proxy --cleanup", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, time.Second, true},
		{"the kube-proxy that wrote it", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, 2 * time.Hour, false},
		{"another owner", watch.Neighbour{PID: 4200, Comm: "dockerd"}, time.Second, false},
		{"no process", watch.Neighbour{}, time.Second, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(time.Hour)
				k.with(func() {
					k.neighbour = test.neighbour
					k.neighbour.Since = time.Now().Add(-test.since)
				})
				k.deleteTable(proxyTable)
				r.after(time.Minute)
				if !test.owner {
					r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
					r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision)
					return
				}
				r.wantReady()
				if f := r.d.Status().Flushes; len(f) > 0 || k.standing(proxyTable) != nil {
					t.Errorf("%d records, the table is back: %t", len(f), k.standing(proxyTable) != nil)
				}
				r.wantLog("its owner deleted it, likely")
			})
		})
	}
}
