package watch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
)

var errOverflow = errors.New("the socket overflowed")

// A fakeSource returns the commits and errors that a test puts into it.
type fakeSource struct {
	events chan any
	closed chan struct{}
	once   sync.Once
}

func newFakeSource() *fakeSource {
	return &fakeSource{events: make(chan any, 16), closed: make(chan struct{})}
}

func (f *fakeSource) Receive() (nft.Commit, error) {
	select {
	case e := <-f.events:
		if err, bad := e.(error); bad {
			return nft.Commit{}, err
		}
		return e.(nft.Commit), nil
	case <-f.closed:
		return nft.Commit{}, errors.New("use of a closed source")
	}
}

func (f *fakeSource) Close() error {
	f.once.Do(func() { close(f.closed) })
	return nil
}

// start runs run until the returned function is called, which waits for its end.
func start(run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = run(ctx) })
	return func() { cancel(); done.Wait() }
}

// all takes the values that are in a channel now.
func all[T any](c <-chan T) []T {
	var values []T
	for {
		select {
		case v := <-c:
			values = append(values, v)
		default:
			return values
		}
	}
}

// looked takes a pending hint, if there is one.
func looked(h *Hints) bool {
	select {
	case <-h.C():
		return true
	default:
		return false
	}
}

func TestCommitIsNotedAndHinted(t *testing.T) {
	proc := fakeProc(t, 42, "iptables", "iptables\x00-F\x00")
	synctest.Test(t, func(t *testing.T) {
		source := newFakeSource()
		w := &CommitWatcher{
			Subscribe: func() (CommitSource, error) { return source, nil },
			Hints:     NewHints(), Writers: new(Writers), proc: proc,
		}
		defer start(w.Run)()
		synctest.Wait()
		if !looked(w.Hints) {
			t.Error("no hint after the subscription: what came before it was not seen")
		}

		source.events <- nft.Commit{Genid: 5, PID: 42, Comm: "iptables"}
		// canaryd's own write is a reason to look, but canaryd is no writer.
		source.events <- nft.Commit{Genid: 6, PID: 42, Comm: "canaryd", Own: true}
		source.events <- nft.Commit{Genid: 6, PID: 42, Comm: "nft\n"}
		synctest.Wait()
		if !looked(w.Hints) {
			t.Error("no hint after a commit")
		}
		want := []Writer{
			{Time: time.Now(), Genid: 5, PID: 42, Comm: "iptables", Command: "iptables -F"},
			{Time: time.Now(), Genid: 6, PID: 42, Comm: `nft\x0a`},
		}
		if diff := cmp.Diff(want, w.Writers.Between(4, 6)); diff != "" {
			t.Errorf("writers (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(map[Source]uint64{SourceNFT: 4, SourceOverflow: 0, SourceLock: 0, SourcePoll: 0, SourceMiss: 0}, w.Hints.Counts()); diff != "" {
			t.Errorf("counts (-want +got):\n%s", diff)
		}
	})
}

func TestCommitWatcherSubscribesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		subscribed := make(chan *fakeSource, 64)
		w := &CommitWatcher{
			Subscribe: func() (CommitSource, error) {
				source := newFakeSource()
				subscribed <- source
				return source, nil
			},
			Hints: NewHints(), Writers: new(Writers), proc: t.TempDir(),
		}
		defer start(w.Run)()
		synctest.Wait()
		looked(w.Hints)

		first := <-subscribed
		first.events <- errOverflow
		synctest.Wait()
		if !looked(w.Hints) || w.Hints.Counts()[SourceOverflow] != 1 {
			t.Error("an overflow was not hinted")
		}
		select {
		case <-first.closed:
		default:
			t.Error("the source that overflowed was not closed")
		}
		time.Sleep(firstRetry)
		synctest.Wait()
		if len(subscribed) != 1 || !looked(w.Hints) {
			t.Fatalf("%d fresh subscriptions, want one and a hint with it", len(subscribed))
		}
		second := <-subscribed
		second.events <- nft.Commit{Genid: 9}
		synctest.Wait()
		if len(w.Writers.Between(8, 9)) != 1 {
			t.Error("the fresh subscription was not listened to")
		}
	})
}

func TestCommitWatcherBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		subscribed := make(chan time.Duration, 64)
		var refuse atomic.Bool
		refuse.Store(true)
		source := newFakeSource()
		w := &CommitWatcher{
			Subscribe: func() (CommitSource, error) {
				subscribed <- time.Since(begin)
				if refuse.Load() {
					return nil, errors.New("operation not permitted")
				}
				return source, nil
			},
			Hints: NewHints(), Writers: new(Writers), proc: t.TempDir(),
		}
		defer start(w.Run)()
		time.Sleep(17 * time.Second)
		synctest.Wait()
		ms := time.Millisecond
		want := []time.Duration{0, 100 * ms, 300 * ms, 700 * ms, 1500 * ms, 3100 * ms, 6300 * ms, 11300 * ms, 16300 * ms}
		if diff := cmp.Diff(want, all(subscribed)); diff != "" {
			t.Errorf("subscriptions (-want +got):\n%s", diff)
		}
		if got := w.Hints.Counts()[SourceOverflow]; got != uint64(len(want)) {
			t.Errorf("%d hints, want one per failure, %d", got, len(want))
		}

		refuse.Store(false)
		time.Sleep(lastRetry)
		source.events <- nft.Commit{Genid: 1}
		synctest.Wait()
		failed := time.Now()
		source.events <- errOverflow
		synctest.Wait()
		time.Sleep(firstRetry)
		synctest.Wait()
		at := all(subscribed)
		if last := begin.Add(at[len(at)-1]).Sub(failed); last != firstRetry {
			t.Errorf("after a subscription that worked the next one came %s later, want %s", last, firstRetry)
		}
	})
}
