package iptablestest

import (
	"net"
	"sync"

	"github.com/canaryd/canaryd/pkg/nft"
)

// subscriptionBuffer is how many commits a Subscription holds for a
// reader that is slow.
const subscriptionBuffer = 256

// A Subscription is to a Fake what a Subscription is to a Kernel: it
// receives one Commit for each commit to nf_tables from Subscribe on.
type Subscription struct {
	commits  chan nft.Commit
	overflow chan struct{}
	closed   chan struct{}
	close    func()
}

// Subscribe opens a subscription. On legacy it never receives anything.
func (f *Fake) Subscribe() *Subscription {
	s := &Subscription{
		commits:  make(chan nft.Commit, subscriptionBuffer),
		overflow: make(chan struct{}, 1),
		closed:   make(chan struct{}),
	}
	s.close = sync.OnceFunc(func() { close(s.closed) })
	f.OnCommit(func(c nft.Commit) {
		select {
		case <-s.closed:
		case s.commits <- c:
		default:
			s.Overflow()
		}
	})
	return s
}

// Receive waits for the next commit. It returns ErrOverflow once after some
// were dropped or Overflow was called, and net.ErrClosed after Close. It is for
// one goroutine; Close and Overflow may be called from others.
func (s *Subscription) Receive() (nft.Commit, error) {
	select {
	case <-s.closed:
		return nft.Commit{}, net.ErrClosed
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

// Overflow makes a Receive return ErrOverflow, as if commits had been dropped.
func (s *Subscription) Overflow() {
	select {
	case s.overflow <- struct{}{}:
	default:
	}
}

// Close ends the subscription and lets a waiting Receive return. It never fails.
func (s *Subscription) Close() error {
	s.close()
	return nil
}
