package watch

import (
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Writer is a process that wrote to the tables, or that held the xtables
// lock and so may have written.
type Writer struct {
	Time    time.Time // when its commit or its use of the lock was received
	Genid   uint32    // of the nf_tables commit; 0 for a holder of the lock
	PID     uint32    // in the initial pid namespace; 0 if unknown
	Comm    string    // the kernel's name for it, printable
	Command string    // its command line, printable; empty if it was gone already
	Origin  Origin    // its ancestors, unit and container
	By      Doer      // the process that decided on the write; zero: unknown
	Own     bool      // this process, or a program that it executed
	// Unread: the writer is an nft, and it or its parent was gone before it could
	// be read. Its command line may be known. Only such a writer has a Neighbour.
	Unread    bool
	Neighbour Neighbour
	Opened    bool // it has opened the lock, and was not seen to release it
}

// WritersKept bounds the memory of Writers, separately for commits and for
// holders of the lock. A firewalld reload commits about twenty times, a purge
// once for each rule. Each user of the lock is noted twice.
const WritersKept = 512

// Writers remembers the newest 512 commits and the newest 512 holders of the
// xtables lock. A flush record names the writers between the last intact look and
// the first loss.
//
// A commit watcher and a lock watcher may share one Writers. A commit never takes
// a holder's place, and is never named for tables that are written under the
// lock. All methods may be called by any number of goroutines; a mutex is locked
// for a copy of at most 512 values.
type Writers struct {
	mu               sync.Mutex
	commits, holders writerRing
}

// A writerRing has the newest WritersKept of a series of writers.
type writerRing struct {
	kept [WritersKept]Writer
	next uint64 // how many were noted; next%WritersKept is the slot to fill
}

// Note remembers w and forgets the oldest of its kind if there are too many. The watchers call
// it for each commit, and with Genid 0 for each use of the lock.
func (ws *Writers) Note(w Writer) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ring := &ws.commits
	if w.Genid == 0 {
		ring = &ws.holders
	}
	ring.kept[ring.next%WritersKept] = w
	ring.next++
}

// Between returns the writers of the commits after genid after, up to and
// including genid upto, oldest first, without canaryd's own. Genids count up and
// wrap around; the two may be at most 2^31 apart.
//
// A commit becomes visible to a probe a moment before its notification is read.
// So an answer may lack the newest writer, and the next answer has it.
func (ws *Writers) Between(after, upto uint32) []Writer {
	return ws.selected(&ws.commits, func(w Writer) bool { return !w.Own && w.between(after, upto) })
}

func (w Writer) between(after, upto uint32) bool {
	return nft.Newer(w.Genid, after) && !nft.Newer(w.Genid, upto)
}

// Heard reports whether every commit after genid after and up to genid upto was noted,
// canaryd's own among them. Then Between leaves no writer out: if it has a single process, that
// is the flusher.
func (ws *Writers) Heard(after, upto uint32) bool {
	heard := map[uint32]bool{}
	for _, w := range ws.selected(&ws.commits, func(w Writer) bool { return w.between(after, upto) }) {
		heard[w.Genid] = true
	}
	want := upto - after
	if upto < after {
		want-- // the counter leaves out 0
	}
	return uint32(len(heard)) == want
}

// Noted reports whether a commit was noted: the kernel has notified of it, and it is done.
func (ws *Writers) Noted(genid uint32) bool {
	return len(ws.selected(&ws.commits, func(w Writer) bool { return w.Genid == genid })) > 0
}

// Of returns the writer of a commit as it was noted, for the search for a flusher. If it was
// not noted, the result has only the kernel's data.
func (ws *Writers) Of(c nft.Commit) Writer {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ring := &ws.commits
	for i := ring.next - min(ring.next, WritersKept); i < ring.next; i++ {
		if w := &ring.kept[i%WritersKept]; w.Genid == c.Genid {
			return *w
		}
	}
	return Writer{Genid: c.Genid, PID: c.PID, Comm: printable([]byte(c.Comm), maxCommand), Own: c.Own}
}

// Since returns the writers of the commits that were noted at or after t, oldest
// first, without canaryd's own.
func (ws *Writers) Since(t time.Time) []Writer {
	return ws.selected(&ws.commits, func(w Writer) bool { return !w.Own && !w.Time.Before(t) })
}

// Holders returns the holders of the xtables lock that were noted at or after t,
// oldest first. It is for the legacy backend, whose tables have no genid.
func (ws *Writers) Holders(t time.Time) []Writer {
	return ws.selected(&ws.holders, func(w Writer) bool { return !w.Time.Before(t) })
}

// selected returns the writers of a ring that want accepts, oldest first, for the methods
// above. It locks ws.mu and calls want under it.
func (ws *Writers) selected(ring *writerRing, want func(Writer) bool) []Writer {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	var found []Writer
	for i := ring.next - min(ring.next, WritersKept); i < ring.next; i++ {
		if w := ring.kept[i%WritersKept]; want(w) {
			found = append(found, w)
		}
	}
	return found
}
