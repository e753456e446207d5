package daemon

import (
	"context"
	"sync"

	"github.com/canaryd/canaryd/internal/api"
)

// watchBehind is how many changes a watcher may be behind. A watcher that falls behind further
// loses the oldest changes: it never delays the loop.
const watchBehind = 64

// watchers are the followers of the status. The zero value has none.
type watchers struct {
	mu   sync.Mutex
	list map[chan *published]struct{}
	own  int // of the daemon itself, which MostWatchers does not count
}

// add returns the present status, a channel for each later one, and a function that ends that.
// It fails if there are too many watchers. Watch calls it.
func (w *watchers) add(status func() api.Status) (now api.Status, news chan *published, end func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.list)-w.own >= api.MostWatchers {
		return api.Status{}, nil, nil, api.ErrTooManyWatchers
	}
	now, news, end = w.open(status)
	return now, news, end, nil
}

// follow is add for the daemon itself (Report), whose place no client takes. It cannot fail.
func (w *watchers) follow(status func() api.Status) (now api.Status, news chan *published, end func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.own++
	now, news, closeIt := w.open(status)
	return now, news, func() {
		closeIt()
		w.mu.Lock()
		defer w.mu.Unlock()
		w.own--
	}
}

// open opens a channel. The lock is held.
func (w *watchers) open(status func() api.Status) (now api.Status, news chan *published, end func()) {
	if w.list == nil {
		w.list = map[chan *published]struct{}{}
	}
	news = make(chan *published, watchBehind)
	w.list[news] = struct{}{}
	return status(), news, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.list, news)
	}
}

// give publishes a status by publish and gives it to each watcher. It never waits: a slow
// watcher loses the oldest.
func (w *watchers) give(s *published, publish func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	publish() // under the lock: a watcher that is added meanwhile sees it once
	for news := range w.list {
		if len(news) == cap(news) {
			select {
			case <-news: // the oldest
			default:
			}
		}
		news <- s // there is room: nothing else sends
	}
}

// Watch calls see with the present status, and with each later one that Differs from the status
// before. It ends with ctx, or with the error that see returns. There are at most
// api.MostWatchers at a time.
func (d *Daemon) Watch(ctx context.Context, see func(api.Status) error) error {
	last, news, end, err := d.watchers.add(d.Status)
	if err != nil {
		return err
	}
	defer end()
	if err := see(last); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case next := <-news:
			now := next.complete()
			if !now.Differs(last) {
				continue
			}
			last = now
			if err := see(last); err != nil {
				return err
			}
		}
	}
}
