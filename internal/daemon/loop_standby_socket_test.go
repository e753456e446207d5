package daemon

import (
	"net"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStandbysOfBothRealmsShareASocket: one realm finds that the socket is gone. Then no copy
// of the other realm is reported as armed, and all are built again.
func TestStandbysOfBothRealmsShareASocket(t *testing.T) {
	for name, lose := range map[string]func(*rig, *fakeStandby, *fakeNative, *fakeNativeStandby){
		"found by a family": func(r *rig, s *fakeStandby, _ *fakeNative, _ *fakeNativeStandby) {
			s.set(func(s *fakeStandby) { s.followErr = net.ErrClosed })
			r.endpoint(1, true)
		},
		"found by a native table": func(_ *rig, _ *fakeStandby, k *fakeNative, n *fakeNativeStandby) {
			n.set(func(s *fakeNativeStandby) { s.followErr = net.ErrClosed })
			k.sync(natTable(proxyTable, "a"))
		},
	} {
		bubble(t, name, func(t *testing.T) {
			k := newFakeNative(natTable(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
			n, fake := newFakeNativeStandby(k), loadedFake(t, "nft")
			s := newFakeStandby(fake)
			r := run(t, fake, setup{guarded: k, nativeStandby: n, standby: s})
			r.after(10 * time.Second)
			r.wantStandby(s, api.StandbyArmed)
			r.wantNativeStandby(n, api.StandbyArmed)
			lost := time.Now()
			lose(r, s, k, n)
			r.after(3 * time.Second)
			s.set(func(s *fakeStandby) { s.followErr = nil })
			n.set(func(s *fakeNativeStandby) { s.followErr = nil })
			r.after(pace.MakeAgain)
			r.wantStandby(s, api.StandbyArmed)
			r.wantNativeStandby(n, api.StandbyArmed)
			for _, f := range []rules.Family{rules.IPv4, rules.IPv6} {
				if len(s.named("write "+f.String(), lost)) == 0 {
					t.Errorf("%s: the copy that went with the socket was not built again", f)
				}
			}
			if len(n.named("follow "+proxyTable.NFT(), lost)) == 0 {
				t.Error("the native copy that went with the socket was not built again")
			}
		})
	}
}
