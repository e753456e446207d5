package daemon

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A suspended kernel answers one read of IPv4 after 30 s, with an error: canaryd was stopped in
// the middle of it, and the time of its child was up when it went on.
type suspended struct {
	*iptablestest.Fake
	armed atomic.Bool
}

func (s *suspended) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if f == rules.IPv4 && s.armed.Swap(false) {
		time.Sleep(30 * time.Second)
		return iptables.Snapshot{}, errors.New("iptables-nft-restore was killed: it did not end within 30s")
	}
	return s.Fake.Read(ctx, f)
}

// TestSuspendedInTheMiddleOfARead: what owners wrote meanwhile is known within as long again,
// because the read cost next to nothing.
func TestSuspendedInTheMiddleOfARead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &suspended{Fake: loadedFake(t, iptables.NFT)}
		r := run(t, k.Fake, setup{kernel: k, cpu: func() time.Duration { return 0 }})
		r.settled()
		before := r.d.Status().Generation.ID
		k.armed.Store(true)
		r.write(rules.Nat, "-A KUBE-SERVICES -s 192.0.2.9/32 -j RETURN")
		r.after(31 * time.Second)
		r.wantLog("could not be read")
		r.after(31 * time.Second)
		r.wantReady()
		if r.d.Status().Generation.ID == before {
			t.Error("the change is not known a minute after it")
		}
	})
}
