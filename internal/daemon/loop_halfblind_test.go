package daemon

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A halfBlind kernel cannot read one family.
type halfBlind struct {
	*iptablestest.Fake
	family atomic.Int64 // a rules.Family; 0: it can read both
}

func (k *halfBlind) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if int64(f) == k.family.Load() {
		return iptables.Snapshot{}, errInjected
	}
	return k.Fake.Read(ctx, f)
}

func (k *halfBlind) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := k.Fake.Begin(ctx)
	return halfBlindSession{s, k}, err
}

type halfBlindSession struct {
	iptables.Session
	kernel *halfBlind
}

func (s halfBlindSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	if int64(f) == s.kernel.family.Load() {
		return iptables.Snapshot{}, errInjected
	}
	return s.Session.Read(ctx, f)
}

// TestOneFamilyCannotBeRead: reads of one family fail, from the start or later. canaryd heals a
// loss of the other family. The record stays open, because the flush may have taken more from
// the unread family, and is completed once that can be read.
func TestOneFamilyCannotBeRead(t *testing.T) {
	for name, fromStart := range map[string]bool{"from the start": true, "later": false} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				k := &halfBlind{Fake: loadedFake(t, backend)}
				if fromStart {
					k.family.Store(int64(rules.IPv4))
				}
				r := run(t, k.Fake, setup{kernel: k})
				r.after(5 * time.Second)
				k.family.Store(int64(rules.IPv4))
				r.after(5 * time.Second)
				before := r.chain(rules.IPv6, rules.Nat, "KUBE-SERVICES")
				must(t, r.fake.Flush(rules.IPv6, rules.Nat, ""))
				r.after(30 * time.Second)
				if diff := cmp.Diff(before, r.chain(rules.IPv6, rules.Nat, "KUBE-SERVICES")); diff != "" {
					t.Errorf("KUBE-SERVICES (-want +got):\n%s", diff)
				}
				if got := r.oneRecord(); got.Outcome != reload.Failed {
					t.Errorf("the record says %s while a family cannot be read", got.Outcome)
				}
				r.wantNotReady("ipv4")
				k.family.Store(0)
				r.after(3 * time.Second)
				// The record has the result of the first try, and not of the last look.
				got := r.oneRecord()
				if got.Outcome != reload.Proved || got.Detail != "" || got.AbsentSeconds > 0.1 {
					t.Errorf("in the end the record says %s after %v s, %q; want what the first try came to", got.Outcome, got.AbsentSeconds, got.Detail)
				}
				if moved := r.metrics("rules_absent_seconds"); len(moved) != 1 {
					t.Errorf("recoveries: %v", moved)
				}
				r.after(time.Minute)
				r.wantReady()
			})
		})
	}
}
