package watch

import "sync/atomic"

// A Source says which event caused a hint; it is the label of
// canaryd_hints_total. Only a SourceMiss announces later events: the missing
// rules may belong to a commit under way.
type Source string

// The sources of hints.
const (
	SourceNFT      Source = "nft"      // a process committed to nf_tables
	SourceLock     Source = "lock"     // a process released the xtables lock
	SourcePoll     Source = "poll"     // the daemon's ticker
	SourceMiss     Source = "miss"     // nat did not translate a packet
	SourceOverflow Source = "overflow" // the kernel dropped events, or a watch broke
)

// Sources returns every Source.
func Sources() []Source {
	return []Source{SourceNFT, SourceLock, SourcePoll, SourceMiss, SourceOverflow}
}

// Hints collects reasons to look. The reader receives one hint for any number
// that are given while it is busy. A hint says "look", and does not say at what.
//
// All methods may be called by any number of goroutines.
type Hints struct {
	look   chan struct{}
	counts map[Source]*atomic.Uint64 // never written after NewHints
}

// NewHints returns Hints with nothing pending and every count at 0. All watchers and the daemon
// share it.
func NewHints() *Hints {
	h := &Hints{look: make(chan struct{}, 1), counts: map[Source]*atomic.Uint64{}}
	for _, s := range Sources() {
		h.counts[s] = new(atomic.Uint64)
	}
	return h
}

// Give requests a look. It never blocks: if a look is pending already, it only
// counts. It does not count a source that Sources does not list.
func (h *Hints) Give(s Source) {
	h.Count(s)
	select {
	case h.look <- struct{}{}:
	default:
	}
}

// Count counts a look that needs no hint, such as the daemon's own tick.
func (h *Hints) Count(s Source) {
	if n := h.counts[s]; n != nil {
		n.Add(1)
	}
}

// C delivers one value when there is a reason to look. A look that starts after
// the value was received covers every hint given before.
func (h *Hints) C() <-chan struct{} { return h.look }

// Of returns the number of hints from one source. The daemon sees by it whether packets went
// untranslated.
func (h *Hints) Of(s Source) uint64 {
	if n := h.counts[s]; n != nil {
		return n.Load()
	}
	return 0
}

// Counts returns the number of hints from each source, for the metrics.
func (h *Hints) Counts() map[Source]uint64 {
	counts := make(map[Source]uint64, len(h.counts))
	for s, n := range h.counts {
		counts[s] = n.Load()
	}
	return counts
}
