package iptablestest

import (
	"net"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
)

// subscriptionBuffer is the number of commits that a Subscription stores for a slow reader.
const subscriptionBuffer = 256

// A Subscription is the Fake's counterpart of nft.Subscription. It receives one Commit for each
// commit to nf_tables since Subscribe, without a gap, until the first error, which is the last.
type Subscription struct {
	commits  chan nft.Commit
	overflow chan struct{} // closed when a commit was missed
	closed   chan struct{}
	miss     func()
	close    func()
}

// Subscribe opens a subscription. On legacy it never receives anything.
func (f *Fake) Subscribe() *Subscription {
	s := &Subscription{
		commits:  make(chan nft.Commit, subscriptionBuffer),
		overflow: make(chan struct{}),
		closed:   make(chan struct{}),
	}
	s.miss = sync.OnceFunc(func() { close(s.overflow) })
	s.close = sync.OnceFunc(func() { close(s.closed) })
	f.OnCommit(func(c nft.Commit) {
		select {
		case <-s.closed:
			return
		case <-s.overflow:
			return
		default:
		}
		select {
		case s.commits <- c:
		default:
			s.miss()
		}
	})
	return s
}

// Receive waits for the next commit. It returns ErrOverflow after a commit did not fit or
// Overflow was called, and net.ErrClosed after Close. It is for one goroutine; others may call
// Close and Overflow.
func (s *Subscription) Receive() (nft.Commit, error) {
	select {
	case <-s.closed:
		return nft.Commit{}, net.ErrClosed
	default:
	}
	select {
	case c := <-s.commits:
		return c, nil
	default:
	}
	select {
	case c := <-s.commits:
		return c, nil
	case <-s.overflow:
		return nft.Commit{}, nft.ErrOverflow
	case <-s.closed:
		return nft.Commit{}, net.ErrClosed
	}
}

// Overflow makes Receive return ErrOverflow, as if a commit had been dropped.
func (s *Subscription) Overflow() { s.miss() }

// Close ends the subscription and lets a waiting Receive return. It never fails.
func (s *Subscription) Close() error {
	s.close()
	return nil
}
