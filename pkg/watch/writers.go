package watch

import (
	"sync"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Writer is a process that wrote to the tables, or that held the xtables
// lock and so may have written.
type Writer struct {
	Time    time.Time // when we heard of it
	Genid   uint32    // of the nf_tables commit; 0 for a holder of the lock
	PID     uint32    // in the initial pid namespace; 0 if unknown
	Comm    string    // the kernel's name for it, printable
	Command string    // its command line, printable; empty if it was gone already
	Origin  Origin    // what started it
	Own     bool      // this process, or a program that it executed
}

// writersKept bounds the memory of Writers. A firewalld reload commits about
// twenty times, and who uses the lock is noted twice, so 128 spans a reload
// together with whoever writes beside it.
const writersKept = 128

// Writers remembers who wrote last: the newest 128, for a flush record to name
// everybody who wrote between the last intact look and the first loss.
//
// Watchers note, the loop asks: both may happen at the same time, which is why
// there is a mutex in here. It is held for a copy of 128 values at most.
type Writers struct {
	mu   sync.Mutex
	ring [writersKept]Writer
	next uint64 // how many were noted; next%writersKept is the slot to fill
}

// Note remembers w and forgets the oldest if there are too many.
func (ws *Writers) Note(w Writer) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.ring[ws.next%writersKept] = w
	ws.next++
}

// Between returns the writers of the commits after genid after and up to and
// including genid upto, oldest first, without our own. Genids count up and wrap
// around; the two may lie at most 2^31 apart. Holders of the lock have no genid and
// are left out.
//
// A commit becomes visible to a probe a moment before its notification is
// read, so the newest writer may be missing from an answer and be in the next.
func (ws *Writers) Between(after, upto uint32) []Writer {
	return ws.selected(func(w Writer) bool { return !w.Own && w.between(after, upto) })
}

func (w Writer) between(after, upto uint32) bool {
	return w.Genid != 0 && genidAfter(w.Genid, after) && !genidAfter(w.Genid, upto)
}

// Heard reports whether every commit after genid after and up to genid upto was
// noted, our own among them: then Between leaves no writer out.
func (ws *Writers) Heard(after, upto uint32) bool {
	heard := map[uint32]bool{}
	for _, w := range ws.selected(func(w Writer) bool { return w.between(after, upto) }) {
		heard[w.Genid] = true
	}
	want := upto - after
	if upto < after {
		want-- // the counter leaves out 0
	}
	return uint32(len(heard)) == want
}

// Of returns who made a commit, as it was noted. Of one that was not noted it is no
// more than the kernel said.
func (ws *Writers) Of(c nft.Commit) Writer {
	for _, w := range ws.selected(func(w Writer) bool { return w.Genid == c.Genid && w.Genid != 0 }) {
		return w
	}
	return Writer{Genid: c.Genid, PID: c.PID, Comm: printable([]byte(c.Comm), maxCommand), Own: c.Own}
}

// Since returns everybody noted at or after t, oldest first: the question for
// the legacy backend, whose tables have no genid.
func (ws *Writers) Since(t time.Time) []Writer {
	return ws.selected(func(w Writer) bool { return !w.Time.Before(t) })
}

func (ws *Writers) selected(want func(Writer) bool) []Writer {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	first := uint64(0)
	if ws.next > writersKept {
		first = ws.next - writersKept
	}
	var found []Writer
	for i := first; i < ws.next; i++ {
		if w := ws.ring[i%writersKept]; want(w) {
			found = append(found, w)
		}
	}
	return found
}

// genidAfter reports whether genid a is newer than b, across a wrap-around.
func genidAfter(a, b uint32) bool { return int32(a-b) > 0 }
