package daemon

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTheLoopDigestsNothing: no step of the loop needs the generation's ID. A client that asks
// for the status gets it.
func TestTheLoopDigestsNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		if id := r.d.status.Load().Generation.ID; id != "" {
			t.Errorf("the loop published the ID %s", id)
		}
		before := r.d.Status().Generation.ID
		r.write(rules.Nat, "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 20000 -j CNI-HOSTPORT-SETMARK")
		r.settled()
		if after := r.d.Status().Generation.ID; len(before) != 12 || len(after) != 12 || before == after {
			t.Errorf("the generation %s became %s", before, after)
		}
	})
}

// TestWatch: a follower of the status sees a loss and its end, and nothing while nothing
// happens.
func TestWatch(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		var seen []string
		ended := make(chan error, 1)
		go func() {
			ended <- r.d.Watch(ctx, func(s api.Status) error {
				mu.Lock()
				defer mu.Unlock()
				line := string(s.Families[rules.IPv4][rules.Nat])
				if len(s.Flushes) > 0 {
					line += " " + string(s.Flushes[0].Outcome)
				}
				if s.Paused {
					line += " paused"
				}
				seen = append(seen, line)
				return nil
			})
		}()
		r.after(10 * time.Minute)
		if len(seen) != 1 {
			t.Errorf("in ten quiet minutes was seen: %q", seen)
		}
		r.flushNat()
		r.after(time.Minute)
		r.pause(time.Hour)
		r.after(time.Second)
		want := []string{"intact", "emptied", "intact proved", "intact proved paused"}
		if diff := cmp.Diff(want, slices.Compact(slices.Clone(seen))); diff != "" {
			t.Errorf("what was seen (-want +got):\n%s", diff)
		}
		if len(seen) > len(want)+6 { // others: the generation's ID, a completed record
			t.Errorf("%d lines for that: %q", len(seen), seen)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("the end is %v", err)
		}
	})
}

// TestWatchersAreBounded: canaryd refuses one client too many. A slow client delays nothing,
// and gets the newest status in the end. A place is free again when a client ends.
func TestWatchersAreBounded(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		read, last := make(chan struct{}), make([]api.Status, api.MostWatchers)
		for n := range api.MostWatchers {
			all.Go(func() {
				_ = r.d.Watch(ctx, func(s api.Status) error {
					<-read
					last[n] = s
					return nil
				})
			})
		}
		synctest.Wait()
		if err := r.d.Watch(ctx, nil); !errors.Is(err, api.ErrTooManyWatchers) {
			t.Errorf("one client too many: %v", err)
		}
		for range 100 {
			r.pause(time.Hour)
			r.resume()
		}
		r.flushNat()
		r.settled()
		r.wantReady()
		close(read)
		r.after(time.Second)
		for n, s := range last {
			if s.Differs(r.d.Status()) || len(s.Flushes) != 1 {
				t.Errorf("client %d has not seen the newest: %+v", n, s)
			}
		}
		cancel()
		all.Wait()
		enough := errors.New("enough")
		if err := r.d.Watch(t.Context(), func(api.Status) error { return enough }); !errors.Is(err, enough) {
			t.Errorf("after all have ended: %v", err)
		}
	})
}
