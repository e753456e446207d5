// Package watch gives a hint when a table may have changed, and remembers which process wrote. It
// receives the commits to nf_tables, and sees when a process releases the xtables lock.
//
// A hint is a reason to look and never evidence. The description of a process and
// of its parents is read from /proc while the process lives. Its text is
// controlled by others, so it is bounded and escaped.
//
// A [CommitWatcher] receives commits from a [CommitSource], such as an iptables.Kernel's
// subscription. A [LockWatcher] waits for releases of the xtables lock, the only sign on the legacy
// backend. [Watchers] runs the watchers that the guarded tables need. Each gives [Hints], whose
// channel wakes the reader, and notes in [Writers] the [Writer] with its [Origin]. The reader looks
// at the tables, and then gets from Writers the processes that wrote since the last look.
//
// Run watches until its context ends, and then returns nil. A broken watcher is
// set up again, and gives a hint, because it may have missed something. Hints and
// Writers may be used by any number of goroutines.
package watch

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"
)

// Signs are the events that reveal a writer of tables.
type Signs struct {
	Commits bool // to nf_tables
	Lock    bool // the xtables lock, which iptables-legacy takes
}

// Watchers run at the same time, with the same hints and the same writers.
type Watchers struct {
	Hints     *Hints
	Writers   *Writers
	Subscribe func() (CommitSource, error) // for Commits: see CommitWatcher
	Lock      string                       // for Lock: the lock file, such as /run/xtables.lock
}

// Run watches for these signs and for no others until ctx ends, and then returns nil. On the
// legacy backend only the lock shows a writer.
func (w Watchers) Run(ctx context.Context, signs Signs) error {
	var group errgroup.Group
	if signs.Commits {
		commits := &CommitWatcher{Subscribe: w.Subscribe, Hints: w.Hints, Writers: w.Writers}
		group.Go(func() error { return commits.Run(ctx) })
	}
	if signs.Lock {
		lock := &LockWatcher{Path: w.Lock, Hints: w.Hints, Writers: w.Writers}
		group.Go(func() error { return lock.Run(ctx) })
	}
	return group.Wait()
}

// procFolder is where the kernel shows its processes.
const procFolder = "/proc"

// watchAgain sets up a broken watch after firstRetry, and later after lastRetry.
// The poll covers the gap, and a kernel that always refuses gets twelve requests
// a minute.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// watchAgain runs watch again and again until ctx ends, because a watcher must
// never fall silent. Each end of a watch gives a hint, because something may have
// been missed. The pause after it doubles from firstRetry to lastRetry.
//
// watch reports whether it worked before it ended; then the next pause is short
// again. Only the first of several failures in a row is logged.
func watchAgain(ctx context.Context, name string, hints *Hints, watch func(context.Context) (worked bool, err error)) {
	log := klog.FromContext(ctx)
	pause, failing := firstRetry, false
	for {
		worked, err := watch(ctx)
		if ctx.Err() != nil {
			return
		}
		hints.Give(SourceOverflow)
		if worked {
			pause, failing = firstRetry, false
		}
		if !failing {
			log.Error(err, "A watch ended; until it is set up again, only polls find changes", "watch", name)
			failing = true
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, lastRetry)
	}
}
