package daemon

import (
	"sync/atomic"
	"time"
)

// A worker does one kind of work on a goroutine of its own. So the loop does not wait for the
// kernel or the disk. The worker gets values, and the loop takes up the results once done has a
// message. The loop hands over the next work only after that.
type worker struct {
	name  string
	limit time.Duration // how long one piece of work may take
	todo  chan func()
	done  chan struct{}
	now   atomic.Pointer[running] // the work under way; nil: none
	delay func()                  // called before each piece of work; nil, except in tests
}

func newWorker(name string, limit time.Duration) *worker {
	return &worker{name: name, limit: limit, todo: make(chan func(), 1), done: make(chan struct{}, 1)}
}

// runWorker works until w.todo is closed.
func (d *Daemon) runWorker(w *worker) {
	for do := range w.todo {
		used := d.cpu()
		w.now.Store(&running{w.name, time.Now(), w.limit})
		if w.delay != nil {
			w.delay()
		}
		do()
		w.now.Store(nil)
		d.elsewhere.Add(int64(d.cpu() - used))
		w.done <- struct{}{}
	}
}
