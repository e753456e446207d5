package watch

import (
	"cmp"
	"context"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A CommitSource receives every commit to nf_tables in this network namespace, without a gap.
type CommitSource interface {
	// Receive waits for the next commit. Its first error, an overflow included, is its last.
	Receive() (nft.Commit, error)
	// Close ends a Receive that waits.
	Close() error
}

// A CommitWatcher turns nf_tables commits into hints, and notes at once which process
// committed: of one that lives for 3 ms nothing can be read later.
type CommitWatcher struct {
	// Subscribe opens a new source: a (*iptables.Kernel).Subscribe.
	Subscribe func() (CommitSource, error)
	Hints     *Hints
	Writers   *Writers

	proc string // procFolder unless a test says otherwise
	last committer
	// neighbour was found next to the last writer that was gone, at neighbourAt.
	neighbour   Neighbour
	neighbourAt time.Time
}

// Run watches until ctx ends and then returns nil. A source that fails or
// overflows is replaced by a fresh one, after 100 ms at first and 5 s at last;
// both the end and the new beginning are hints, because commits in between
// were not seen.
func (w *CommitWatcher) Run(ctx context.Context) error {
	watchAgain(ctx, "nft commits", w.Hints, w.watch)
	return nil
}

// watch follows one subscription until it fails or ctx ends. It worked if it
// received a commit.
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

// note remembers the writer of a commit. It comes before the hint, so that the reader of
// the hint finds the writer. A commit of ours is no flush: while one family is put back
// another may be found lost, and only its flusher is to be named for it.
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
