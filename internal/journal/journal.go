// Package journal keeps records on disk, as lines of JSON in two files of bounded size. It writes
// on a goroutine of its own, so that a slow or full disk delays no caller.
//
// Call [New], then [Journal.Load] for the entries of earlier runs, and [Journal.Run] on a
// goroutine. [Journal.Keep] hands an entry to Run, and [Journal.Find] returns one. [Journal.Close]
// ends Run after the last entry.
//
// Keep returns [ErrBusy] if too many entries wait, and Find [ErrNotFound]. Run reports each failed
// write to its caller. Keep and Find may be called concurrently while Run works.
package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"
)

const (
	queued = 64 // entries that may wait while the disk does not answer
	// unwritten is how many of the newest entries are kept while writing fails. canaryd tries
	// again with each new entry, and every retryAfter.
	unwritten  = 16
	retryAfter = time.Minute
)

var (
	// ErrBusy means that too many entries wait for the disk already.
	ErrBusy = errors.New("the disk does not keep up with the journal")
	// ErrNotFound means that the journal has no entry with that ID, or no longer has it.
	ErrNotFound = errors.New("the journal has no such entry")
	// errEnded means that Run has ended.
	errEnded = errors.New("the journal is closed")
)

// An Entry is one event. It replaces an earlier entry with the same ID, but keeps the old
// Detail if it has none.
type Entry struct {
	ID string `json:"id"` // 1 to 16 hexadecimal digits
	// About is a summary in one line, for programs that follow the file, such as
	// node-problem-detector.
	About  string          `json:"about,omitempty"`
	Record json.RawMessage `json:"record"`
	// Only Find reads Detail again.
	Detail json.RawMessage `json:"detail,omitempty"`
}

// A Journal manages the two files in one folder. Call Load before Run, call Keep and Find while
// Run works, and Close after the last Keep.
type Journal struct {
	path, old string
	room      int64 // the most bytes of each file
	entries   chan Entry
	asks      chan func(waiting []Entry) // of Find; Run calls them
	ended     chan struct{}
}

// New returns the journal in a folder, which may still be empty. It writes nothing before Run.
func New(dir string) *Journal {
	return &Journal{
		path: filepath.Join(dir, "journal.jsonl"), old: filepath.Join(dir, "journal.1.jsonl"), room: maxFile,
		entries: make(chan Entry, queued), asks: make(chan func([]Entry)), ended: make(chan struct{}),
	}
}

// Keep hands an entry to Run, which writes it later. It never waits; the error is ErrBusy.
func (j *Journal) Keep(e Entry) error {
	select {
	case j.entries <- e:
		return nil
	default:
		return ErrBusy
	}
}

// Close ends Run, once all entries are written. It does not wait.
func (j *Journal) Close() { close(j.entries) }

// Find returns the entry of that ID, even if it is not written yet. Run's goroutine searches,
// so Find waits for it. Without such an entry the error is ErrNotFound.
func (j *Journal) Find(ctx context.Context, id string) (Entry, error) {
	var entry Entry
	var err error
	found := make(chan struct{})
	ask := func(waiting []Entry) {
		entry, err = j.find(id, waiting)
		close(found)
	}
	select {
	case j.asks <- ask:
	case <-j.ended:
		return Entry{}, errEnded
	case <-ctx.Done():
		return Entry{}, ctx.Err()
	}
	select {
	case <-found:
		return entry, err
	case <-ctx.Done():
		return Entry{}, ctx.Err()
	}
}

// Run writes entries until Close. It calls report with the result of each write: an error, or
// nil.
func (j *Journal) Run(report func(error)) {
	defer close(j.ended)
	j.create()
	var waiting []Entry
	flush := func() {
		if len(waiting) == 0 {
			return
		}
		rest, err := j.write(waiting)
		waiting = rest[max(len(rest)-unwritten, 0):]
		report(err)
	}
	again := time.NewTicker(retryAfter)
	defer again.Stop()
	for {
		select {
		case e, open := <-j.entries:
			if !open {
				flush()
				return
			}
			waiting = j.drain(add(waiting, e))
			flush()
		case <-again.C:
			flush()
		case ask := <-j.asks:
			waiting = j.drain(waiting)
			flush()
			ask(waiting)
		}
	}
}

// drain adds the entries that have arrived meanwhile, so that Run writes them together.
func (j *Journal) drain(waiting []Entry) []Entry {
	for {
		select {
		case e, open := <-j.entries:
			if !open {
				return waiting // Run's next receive sees it too
			}
			waiting = add(waiting, e)
		default:
			return waiting
		}
	}
}

// add returns the entries with e added, or merged with the earlier entry of the same ID.
func add(entries []Entry, e Entry) []Entry {
	i := slices.IndexFunc(entries, func(o Entry) bool { return o.ID == e.ID })
	if i < 0 {
		return append(entries, e)
	}
	entries[i] = entries[i].merge(e)
	return entries
}

// merge returns the entry after next, of the same ID, replaced it. A next without a detail
// keeps the old detail.
func (e Entry) merge(next Entry) Entry {
	if next.Detail == nil {
		next.Detail = e.Detail
	}
	return next
}

// find searches the files and the entries that are not written yet (waiting), for Find in Run's
// goroutine. A file that cannot be read is an error only if the entry is not found.
func (j *Journal) find(id string, waiting []Entry) (Entry, error) {
	var found Entry
	collect := func(e Entry) {
		if e.ID == id {
			found = found.merge(e)
		}
	}
	err := j.read(id, collect)
	for _, e := range waiting {
		collect(e)
	}
	switch {
	case found.ID != "":
		return found, nil
	case err != nil:
		return Entry{}, err
	default:
		return Entry{}, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
}

// Load returns the newest entries, at most n, oldest first and without details. Unreadable ones
// are missing, and the error says why.
func (j *Journal) Load(n int) ([]Entry, error) {
	var entries []Entry
	left := map[string]bool{} // too old, and not to be added again by a later line
	err := j.read("", func(e Entry) {
		if left[e.ID] {
			return
		}
		e.Detail = nil
		if entries = add(entries, e); len(entries) > n {
			left[entries[0].ID] = true
			entries = slices.Delete(entries, 0, 1)
		}
	})
	return entries, err
}
