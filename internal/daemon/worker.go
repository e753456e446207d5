package daemon

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// A worker runs the loop's steps one at a time on a goroutine of its own, so that the
// loop can say of a step that it hangs.
type worker struct {
	jobs chan func()
	done chan struct{}
	wg   sync.WaitGroup
}

// newWorker starts the worker's goroutine.
func newWorker() *worker {
	w := &worker{jobs: make(chan func()), done: make(chan struct{})}
	w.wg.Go(func() {
		for job := range w.jobs {
			job()
			w.done <- struct{}{}
		}
	})
	return w
}

// run runs job on the worker and returns when it is done. What the caller wrote before
// is seen by the job, and what the job wrote by the caller. If the job takes longer than
// limit, late is called meanwhile, once.
func (w *worker) run(job func(), limit time.Duration, late func()) {
	w.jobs <- job
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case <-w.done:
			return
		case <-timer.C:
			late()
		}
	}
}

// stop ends the goroutine and waits for it.
func (w *worker) stop() {
	close(w.jobs)
	w.wg.Wait()
}

// work runs a step on the worker. While it runs, Alive judges it by its limit.
func (d *Daemon) work(ctx context.Context, w *worker, name string, limit time.Duration, do func()) {
	r := &running{name, time.Now(), limit}
	d.running.Store(r)
	w.run(do, limit, func() {
		klog.FromContext(ctx).Error(r.overdue(), "A step hangs; nothing is noticed or put back until canaryd is restarted",
			"step", name, "advice", "the service manager does that; else restart it, and report the goroutines that `kill -QUIT` prints")
	})
	d.beat() // before the step is over for Alive
	d.running.Store(nil)
}
