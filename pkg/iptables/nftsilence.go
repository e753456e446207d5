package iptables

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// silentFrom is how many new rules make a transaction so large that it is sent while
// this Kernel does not listen. The kernel tells of each rule to whoever listens, in
// messages as large as those of a dump: a quarter of the time that a heal of 5,000
// services took, and more at once than a socket's buffer has room for.
const silentFrom = 512

// A rewrite names a chain that a transaction of ours writes.
type rewrite struct {
	family rules.Family
	place  Place
}

// silently calls write, which sends one transaction that has content and changes
// nothing but the chains in written, while neither m nor others listen. Nothing is
// lost by that: the genid says afterwards whether anybody else committed meanwhile.
// If so, m begins anew, and others get ErrOverflow.
func (m *mirror) silently(written []rewrite, others []*nft.Subscription, write func() error) error {
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	default: // another goroutine reads, and is to hear of it
		return write()
	}
	before, heard, err := m.listen()
	if err != nil || !heard || m.events.Leave() != nil {
		return write()
	}
	for _, s := range others {
		s.Leave()
	}
	failed := write()
	for _, s := range others {
		s.Join()
	}
	err = m.events.Join()
	// Asked for after everybody listens again: what is committed from now on is heard.
	now, asked := m.genid()
	switch err = errors.Join(err, asked); {
	case err == nil && now == before:
	case err == nil && failed == nil && now == nft.Following(before):
		m.events.SkipTo(now)
		for _, w := range written {
			m.families[w.family].rewritten(w.place)
		}
	default:
		m.giveUp()
		for _, s := range others {
			s.Miss()
		}
	}
	return failed
}

// giveUp lets the next read begin anew. An error of close would leave nothing to do.
func (m *mirror) giveUp() {
	_ = m.events.Close()
	m.events = nil
}

// rewritten marks a chain that we wrote ourselves. Which chains there are is asked
// too: of new ones the handle is not known.
func (f *mirrored) rewritten(place Place) {
	f.stale = true
	if _, ok := f.dirty[place]; !ok {
		f.dirty[place] = false
	}
}
