package daemon

import (
	"context"
	"sync"

	"github.com/canaryd/canaryd/internal/api"
)

// watchBehind is how many changes a watcher may be behind. One that falls behind further loses the
// oldest: it never delays the loop.
const watchBehind = 64

// watchers are those who follow the status. The zero value has none.
type watchers struct {
	mu   sync.Mutex
	list map[chan *api.Status]struct{}
}

// add returns a channel on which each published status comes, and what ends that.
func (w *watchers) add() (news chan *api.Status, end func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.list) >= api.MostWatchers {
		return nil, nil, api.ErrTooManyWatchers
	}
	if w.list == nil {
		w.list = map[chan *api.Status]struct{}{}
	}
	news = make(chan *api.Status, watchBehind)
	w.list[news] = struct{}{}
	return news, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.list, news)
	}, nil
}

// give gives a status to each watcher. It never waits.
func (w *watchers) give(s *api.Status) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for news := range w.list {
		for full := true; full; {
			select {
			case news <- s:
				full = false
			default:
				select {
				case <-news: // the oldest
				default:
				}
			}
		}
	}
}

// Watch calls see with the status of now, and with each later one that differs from the one before
// in what matters, until ctx ends or see returns an error, which it returns. There are at most
// api.MostWatchers at a time.
func (d *Daemon) Watch(ctx context.Context, see func(api.Status) error) error {
	news, end, err := d.watchers.add()
	if err != nil {
		return err
	}
	defer end()
	last := d.Status()
	if err := see(last); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case next := <-news:
			if !next.Differs(last) {
				continue
			}
			last = *next
			if err := see(last); err != nil {
				return err
			}
		}
	}
}
