// Package journal keeps records on disk, as lines of JSON in two files of bounded
// size. It writes on a goroutine of its own, so that a slow or full disk delays
// nobody who has something to tell.
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
	queued = 64 // entries that may wait for the disk to answer
	// unwritten entries are kept, newest ones first, until the disk has room again,
	// which is tried with each new entry and every retryAfter.
	unwritten  = 16
	retryAfter = time.Minute
)

var (
	// ErrBusy: the disk takes nothing and too many entries wait for it already.
	ErrBusy = errors.New("the disk does not keep up with the journal")
	// ErrNotFound: the journal has no entry of that ID, or none any more.
	ErrNotFound = errors.New("the journal has no such entry")
	// errEnded: whoever wrote the journal has ended.
	errEnded = errors.New("the journal is closed")
)

// An Entry is one thing that happened. An entry takes the place of an earlier one
// with its ID; without a Detail it leaves that one's.
type Entry struct {
	ID     string          `json:"id"` // 1 to 16 hexadecimal digits
	Record json.RawMessage `json:"record"`
	// Detail is what is read again only if somebody asks for this entry.
	Detail json.RawMessage `json:"detail,omitempty"`
}

// A Journal is the two files in one folder. Load before Run; Keep and Find while
// it runs; Close, after the last Keep, ends it.
type Journal struct {
	path, old string
	room      int64 // how long each may get
	entries   chan Entry
	asks      chan ask
	ended     chan struct{}
}

// An ask is somebody who waits for an entry.
type ask struct {
	id     string
	answer chan<- answer // with room for it
}

type answer struct {
	entry Entry
	err   error
}

// New returns the journal in a folder, which need not hold one yet.
func New(dir string) *Journal {
	return &Journal{
		path: filepath.Join(dir, "journal.jsonl"), old: filepath.Join(dir, "journal.1.jsonl"), room: maxFile,
		entries: make(chan Entry, queued), asks: make(chan ask), ended: make(chan struct{}),
	}
}

// Keep has an entry written soon. It never waits; the error is ErrBusy.
func (j *Journal) Keep(e Entry) error {
	select {
	case j.entries <- e:
		return nil
	default:
		return ErrBusy
	}
}

// Close ends Run once everything that was kept is written. It does not wait.
func (j *Journal) Close() { close(j.entries) }

// Find returns the entry of that ID, also one that was kept just now.
func (j *Journal) Find(ctx context.Context, id string) (Entry, error) {
	found := make(chan answer, 1)
	select {
	case j.asks <- ask{id, found}:
	case <-j.ended:
		return Entry{}, errEnded
	case <-ctx.Done():
		return Entry{}, ctx.Err()
	}
	select {
	case a := <-found:
		return a.entry, a.err
	case <-ctx.Done():
		return Entry{}, ctx.Err()
	}
}

// Run writes what is kept until Close. It reports what each write came to: an
// error, or nil.
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
		case a := <-j.asks:
			waiting = j.drain(waiting)
			flush()
			entry, err := j.find(a.id, waiting)
			a.answer <- answer{entry, err}
		}
	}
}

// drain takes in what else was kept by now.
func (j *Journal) drain(waiting []Entry) []Entry {
	for {
		select {
		case e, open := <-j.entries:
			if !open {
				return waiting // the next receive says so too
			}
			waiting = add(waiting, e)
		default:
			return waiting
		}
	}
}

// add returns the entries with another one, in the place of an older one of its
// ID if there is one.
func add(entries []Entry, e Entry) []Entry {
	i := slices.IndexFunc(entries, func(o Entry) bool { return o.ID == e.ID })
	if i < 0 {
		return append(entries, e)
	}
	entries[i] = entries[i].followedBy(e)
	return entries
}

// followedBy returns what two entries of one ID say together.
func (e Entry) followedBy(next Entry) Entry {
	if next.Detail == nil {
		next.Detail = e.Detail
	}
	return next
}

// find looks among what is on disk and what is not written yet.
func (j *Journal) find(id string, waiting []Entry) (Entry, error) {
	var found Entry
	err := j.read(id, func(e Entry) {
		if e.ID == id {
			found = found.followedBy(e)
		}
	})
	for _, e := range waiting {
		if e.ID == id {
			found = found.followedBy(e)
		}
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

// Load returns the newest entries, at most n, oldest first and without details.
// What cannot be read is left out, and the error says why.
func (j *Journal) Load(n int) ([]Entry, error) {
	var entries []Entry
	left := map[string]bool{} // older ones, that are heard of again
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
