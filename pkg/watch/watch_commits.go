package watch

import (
	"cmp"
	"context"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A CommitSource receives every commit to nf_tables in this network namespace, without a gap.
type CommitSource interface {
	// Receive waits for the next commit. Its first error, also an overflow, is
	// its last.
	Receive() (nft.Commit, error)
	// Close ends a waiting Receive.
	Close() error
}

// A CommitWatcher turns nf_tables commits into hints, and notes the process of
// each commit at once: a process may live for only 3 ms.
type CommitWatcher struct {
	// Subscribe opens a new source: a (*iptables.Kernel).Subscribe.
	Subscribe func() (CommitSource, error)
	Hints     *Hints
	Writers   *Writers

	proc string // procFolder, except in tests
	last committer
	// neighbour is the result of the last search for the parent of a writer that
	// was gone, at neighbourAt.
	neighbour   Neighbour
	neighbourAt time.Time
}

// Run watches until ctx ends and then returns nil. It replaces a source that
// fails or overflows, after 100 ms at first and 5 s at last. Both the end and the
// new beginning give hints, because commits in between were missed.
func (w *CommitWatcher) Run(ctx context.Context) error {
	watchAgain(ctx, "nft commits", w.Hints, w.watch)
	return nil
}

// watch follows one subscription until it fails or ctx ends. worked reports
// whether it received a commit.
func (w *CommitWatcher) watch(ctx context.Context) (worked bool, err error) {
	source, err := w.Subscribe()
	if err != nil {
		return false, err
	}
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(closed)
		source.Close()
	})
	defer func() {
		if stop() {
			source.Close()
			return
		}
		<-closed
	}()

	defer w.last.forget()
	w.Hints.Give(SourceNFT)
	for {
		commit, err := source.Receive()
		if err != nil {
			return worked, err
		}
		worked = true
		w.note(commit)
		w.Hints.Give(SourceNFT)
	}
}

// note remembers the writer of a commit. It precedes the hint, so that the hint's
// reader finds the writer. A commit by canaryd is no flush. During a replay of
// one family another may be found lost, and its record must name only the
// flusher.
func (w *CommitWatcher) note(c nft.Commit) {
	if c.Own {
		w.Writers.Note(Writer{Time: time.Now(), Genid: c.Genid, Own: true})
		return
	}
	now := time.Now()
	proc := cmp.Or(w.proc, procFolder)
	p := w.last.of(proc, c.PID, c.Comm, now)
	var neighbour Neighbour
	unread := c.Comm == "nft" && p.unread()
	if unread {
		if now.Sub(w.neighbourAt) >= neighbourEvery {
			w.neighbourAt, w.neighbour = now, neighbourOf(proc, c.PID, now)
		}
		if w.neighbour.before(c.PID) {
			neighbour = w.neighbour
		}
	}
	w.Writers.Note(Writer{
		Time:      now,
		Genid:     c.Genid,
		PID:       c.PID,
		Comm:      printable([]byte(c.Comm), maxCommand),
		Command:   p.command,
		Origin:    p.origin,
		By:        p.by,
		Unread:    unread,
		Neighbour: neighbour,
	})
}
