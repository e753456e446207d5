package watch

import "sync/atomic"

// A Source says where a hint came from; it is the label of
// canaryd_hints_total. Only of SourceMiss more follows: what it shows may be
// of a commit that is still under way.
type Source string

// The sources of hints.
const (
	SourceNFT      Source = "nft"      // a process committed to nf_tables
	SourceLock     Source = "lock"     // a process let go of the xtables lock
	SourcePoll     Source = "poll"     // the daemon's ticker
	SourceMiss     Source = "miss"     // a packet came through that nat did not translate
	SourceOverflow Source = "overflow" // the kernel dropped events, or a watch broke
)

// Sources returns every Source.
func Sources() []Source {
	return []Source{SourceNFT, SourceLock, SourcePoll, SourceMiss, SourceOverflow}
}

// Hints collects reasons to look. However many are given while the reader is
// busy, the reader gets one: a hint says "look", never "what".
//
// All methods may be called by any number of goroutines.
type Hints struct {
	look   chan struct{}
	counts map[Source]*atomic.Uint64 // never written after NewHints
}

// NewHints returns Hints with nothing pending and every count at 0.
func NewHints() *Hints {
	h := &Hints{look: make(chan struct{}, 1), counts: map[Source]*atomic.Uint64{}}
	for _, s := range Sources() {
		h.counts[s] = new(atomic.Uint64)
	}
	return h
}

// Give asks for a look. It never blocks: if a look is pending already, it only
// counts. A source that Sources does not list is not counted.
func (h *Hints) Give(s Source) {
	h.Count(s)
	select {
	case h.look <- struct{}{}:
	default:
	}
}

// Count counts a look that needs no asking, such as the daemon's own tick.
func (h *Hints) Count(s Source) {
	if n := h.counts[s]; n != nil {
		n.Add(1)
	}
}

// C delivers one value when there is a reason to look. Whatever was given
// before the value was received is answered by a look that starts after it.
func (h *Hints) C() <-chan struct{} { return h.look }

// Of returns how many hints one source has given so far.
func (h *Hints) Of(s Source) uint64 {
	if n := h.counts[s]; n != nil {
		return n.Load()
	}
	return 0
}

// Counts returns how many hints each source has given so far.
func (h *Hints) Counts() map[Source]uint64 {
	counts := make(map[Source]uint64, len(h.counts))
	for s, n := range h.counts {
		counts[s] = n.Load()
	}
	return counts
}
