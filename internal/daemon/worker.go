package daemon

import (
	"sync"
	"time"
)

// heartbeat is how often the loop shows that it turns while it waits for the
// worker.
const heartbeat = time.Second

// A worker runs the loop's steps one at a time on a goroutine of its own, so
// that a restore of many seconds does not make the loop look dead.
type worker struct {
	jobs chan func()
	done chan struct{}
	beat func()
	wg   sync.WaitGroup
}

func newWorker(beat func()) *worker {
	w := &worker{jobs: make(chan func()), done: make(chan struct{}), beat: beat}
	w.wg.Go(func() {
		for job := range w.jobs {
			job()
			w.done <- struct{}{}
		}
	})
	return w
}

// run runs job on the worker and returns when it is done. What the caller
// wrote before is seen by the job, and what the job wrote by the caller.
func (w *worker) run(job func()) {
	w.jobs <- job
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case <-w.done:
			return
		case <-ticker.C:
			w.beat()
		}
	}
}

// stop ends the goroutine and waits for it.
func (w *worker) stop() {
	close(w.jobs)
	w.wg.Wait()
}
