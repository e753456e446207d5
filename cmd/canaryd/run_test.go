package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestSigns: each backend is watched by its own sign.
func TestSigns(t *testing.T) {
	for backend, want := range map[iptables.Backend]watch.Signs{
		iptables.NFT:    {Commits: true},
		iptables.Legacy: {Lock: true},
	} {
		if got := signsOf(backend); got != want {
			t.Errorf("%s: watched by %+v, want %+v", backend, got, want)
		}
	}
}

// TestWatchLate: a node with iptables-legacy subscribes to commits only once there is a native
// table to guard.
func TestWatchLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		g, subscribed, ended := nativeGuard{woken: make(chan struct{})}, 0, make(chan error, 1)
		go func() {
			ended <- g.watchLate(ctx, watch.Watchers{Hints: watch.NewHints(), Writers: &watch.Writers{}, Subscribe: func() (watch.CommitSource, error) {
				subscribed++
				return nil, errors.New("not in this test")
			}})
		}()
		synctest.Wait()
		if subscribed != 0 {
			t.Error("it subscribed although no native table stands")
		}
		close(g.woken)
		synctest.Wait()
		if subscribed != 1 {
			t.Errorf("it subscribed %d times once a native table stood", subscribed)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
