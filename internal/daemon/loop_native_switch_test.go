package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
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
