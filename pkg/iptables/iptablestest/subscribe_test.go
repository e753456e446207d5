package iptablestest_test

import (
	"context"
	"net"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The methods that the real Kernel and the Fake must both have.
var (
	_ = []interface {
		Info() iptables.Info
		Families() []rules.Family
		Stamp(context.Context, rules.Family) (iptables.Stamp, error)
		Probe(context.Context, rules.Family, []iptables.Place) (iptables.Probed, error)
		Read(context.Context, rules.Family) (iptables.Snapshot, error)
		Begin(context.Context) (iptables.Session, error)
	}{(*iptables.Kernel)(nil), (*iptablestest.Fake)(nil)}
	_ = []interface {
		Receive() (nft.Commit, error)
		Close() error
	}{(*nft.Subscription)(nil), (*iptablestest.Subscription)(nil)}
)

func TestFakeSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := iptablestest.NewFake(iptables.NFT)
		must(t, f.Restore(v4, canaryText)) // from before: not seen
		s := f.Subscribe()
		must(t, f.As(7, "nft").FlushTable(v4, rules.Nat))
		got, err := s.Receive()
		must(t, err)
		if diff := cmp.Diff(nft.Commit{Genid: 3, PID: 7, Comm: "nft"}, got); diff != "" {
			t.Errorf("commit (-want +got):\n%s", diff)
		}
		for range 300 { // more than it holds
			must(t, f.Restore(v4, canaryText))
		}
		for n := range 256 {
			got, err := s.Receive()
			must(t, err)
			if want := uint32(4 + n); got.Genid != want {
				t.Fatalf("commit %d has genid %d, want %d: there is a gap", n, got.Genid, want)
			}
		}
		for range 2 { // the first error is the last
			must(t, f.Restore(v4, canaryText))
			_, err = s.Receive()
			wantErr(t, "Receive", err, nft.ErrOverflow)
		}
		must(t, s.Close())
		_, err = s.Receive()
		wantErr(t, "Receive", err, net.ErrClosed)

		s = f.Subscribe()
		s.Overflow()
		_, err = s.Receive()
		wantErr(t, "Receive", err, nft.ErrOverflow)
		s = f.Subscribe()
		ended := make(chan error)
		go func() {
			_, err := s.Receive()
			ended <- err
		}()
		synctest.Wait()
		must(t, s.Close())
		wantErr(t, "Receive", <-ended, net.ErrClosed)
		must(t, s.Close())
		_, err = s.Receive()
		wantErr(t, "Receive", err, net.ErrClosed)
	})
}
