package iptablestest

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
)

// A Passenger is another realm of the same kernel, whose riders sessions carry.
type Passenger interface {
	// Takes returns the reason why the kernel refuses the rider's messages, or nil.
	Takes() error
	// Commit applies the messages.
	Commit()
}

// Carries makes sessions carry riders for p. Before that, and on legacy, they carry none.
func (f *Fake) Carries(p Passenger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.passenger = p
}

// Step moves the genid by a commit that touches none of the Fake's tables, and returns it. It
// does not inform listeners.
func (f *Fake) Step() uint32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.genid++
	return f.genid
}

// Genid returns the genid.
func (f *Fake) Genid() uint32 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.genid
}

// Carry gives the next Restore a rider, which is applied if the kernel accepts it and all
// families are written.
func (s *session) Carry(r *iptables.Rider) { s.rider = r }

// board returns a function that applies the session's rider after the tables are written. It
// does nothing after a refusal.
func (s *session) board() (commit func()) {
	s.f.mu.Lock()
	r, p := s.rider, s.f.passenger
	s.f.mu.Unlock()
	if s.rider = nil; r == nil || p == nil || s.f.backend() != iptables.NFT {
		return func() {}
	}
	if r.Genid != s.f.Genid() {
		r.Sent(nft.ErrStale)
		return func() {}
	}
	if err := errors.Join(r.Append(nft.NewBatch()), p.Takes()); err != nil {
		r.Sent(err)
		return func() {}
	}
	return func() {
		p.Commit()
		for family := range s.seen { // canaryd's own commit makes no later restore stale
			s.seen[family]++
		}
		r.Sent(nil)
	}
}
