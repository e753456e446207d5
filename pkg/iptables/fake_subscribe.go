package iptables

import (
	"net"
	"sync"
)

// fakeSubscriptionBuffer is how many commits a FakeSubscription holds for a
// reader that is slow.
const fakeSubscriptionBuffer = 256

// A FakeSubscription is to a Fake what a Subscription is to a Kernel: it
// receives one Commit for each commit to nf_tables from Subscribe on.
type FakeSubscription struct {
	commits  chan Commit
	overflow chan struct{}
	closed   chan struct{}
	close    func()
}

// Subscribe opens a subscription. On legacy it never receives anything.
func (f *Fake) Subscribe() *FakeSubscription {
	s := &FakeSubscription{
		commits:  make(chan Commit, fakeSubscriptionBuffer),
		overflow: make(chan struct{}, 1),
		closed:   make(chan struct{}),
	}
	s.close = sync.OnceFunc(func() { close(s.closed) })
	f.OnCommit(func(c Commit) {
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
func (s *FakeSubscription) Receive() (Commit, error) {
	select {
	case <-s.closed:
		return Commit{}, net.ErrClosed
	default:
	}
	select {
	case c := <-s.commits:
		return c, nil
	case <-s.overflow:
		return Commit{}, ErrOverflow
	case <-s.closed:
		return Commit{}, net.ErrClosed
	}
}

// Overflow makes a Receive return ErrOverflow, as if commits had been dropped.
func (s *FakeSubscription) Overflow() {
	select {
	case s.overflow <- struct{}{}:
	default:
	}
}

// Close ends the subscription and lets a waiting Receive return. It never fails.
func (s *FakeSubscription) Close() error {
	s.close()
	return nil
}
