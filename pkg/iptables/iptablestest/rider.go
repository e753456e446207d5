package iptablestest

import (
	"errors"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
)

// A Passenger is another realm of the same kernel, whose riders a session takes along.
type Passenger interface {
	// Takes returns why the kernel refuses what the rider appended, nil if it takes it.
	Takes() error
	// Commit makes it so.
	Commit()
}

// Carries has sessions take along riders that are for p. Before, and on legacy, they take none.
func (f *Fake) Carries(p Passenger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.passenger = p
}

// Step moves the genid by a commit that touches none of the Fake's tables, and returns it. What
// hears of commits is not called.
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

// Carry has the next Restore take a rider along, if the kernel takes it and all families are
// written.
func (s *session) Carry(r *iptables.Rider) { s.rider = r }

// board returns what makes the session's rider so after the tables were written. Where it is
// refused, that does nothing.
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
		for family := range s.seen { // our own commit makes no later restore stale
			s.seen[family]++
		}
		r.Sent(nil)
	}
}
