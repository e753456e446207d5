package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// subscriptionBuffer is the requested size of the receive buffer, in bytes. The
// kernel charges about 768 bytes for each 56-byte message; the filter drops all
// other messages before they count.
const subscriptionBuffer = 1 << 20

// A Subscription receives one Commit for each transaction that any process, also
// its user's, commits to nf_tables in this network namespace. It returns the
// commits since Subscribe, in their order and without a gap, until the first
// error. Every later Receive returns that error, too. After ErrOverflow,
// subscribe again, and then look at everything.
type Subscription struct {
	conn    *netlink.Conn
	own     func(port, pid uint32) bool
	left    func()            // called by Close
	pending []netlink.Message // received with others, not yet returned
	closed  atomic.Bool
	ended   atomic.Pointer[error] // why Receive has ended; nil while it listens
}

// Subscribe opens a subscription, by which the daemon's watcher learns of each commit. own
// reports whether a commit's netlink address and process are the user's. Subscribe needs
// CAP_NET_ADMIN.
func Subscribe(own func(port, pid uint32) bool) (*Subscription, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, Wrap("opening a netlink socket", err)
	}
	s := &Subscription{conn: conn, own: own, left: func() {}}
	if err := s.begin(); err != nil {
		conn.Close()
		return nil, Wrap("subscribing to commits", err)
	}
	return s, nil
}

// begin makes the socket listen, for Subscribe. It sets the filter before it joins the
// group, so that no other message ever enters the buffer.
func (s *Subscription) begin() error {
	filter, err := bpf.Assemble(onlyNewgen())
	if err != nil {
		return err
	}
	if err := s.conn.SetBPF(filter); err != nil {
		return err
	}
	if err := s.conn.SetReadBuffer(subscriptionBuffer); err != nil {
		return err
	}
	return s.conn.JoinGroup(unix.NFNLGRP_NFTABLES)
}

// onlyNewgen passes messages of type NFT_MSG_NEWGEN. Without it a restore of
// 20,000 rules is 26,666 messages and overflows the default buffer. A genid has a
// datagram of its own (nf_tables_gen_notify), so it suffices to check a
// datagram's first message.
func onlyNewgen() []bpf.Instruction {
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 2}, // the message's type
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: newgenAsLoaded(), SkipFalse: 1},
		bpf.RetConstant{Val: wholeDatagram},
		bpf.RetConstant{Val: 0},
	}
}

// wholeDatagram is the answer of a filter that passes the datagram: more bytes than any has.
const wholeDatagram = 1 << 30

// newgenAsLoaded returns the type NEWGEN as a filter loads it: it is in the machine's byte order,
// and BPF loads in network order.
func newgenAsLoaded() uint32 {
	var wire [2]byte
	binary.NativeEndian.PutUint16(wire[:], uint16(nftType(unix.NFT_MSG_NEWGEN)))
	return uint32(binary.BigEndian.Uint16(wire[:]))
}

// asLoaded32 is newgenAsLoaded for a netlink address.
func asLoaded32(address uint32) uint32 {
	var wire [4]byte
	binary.NativeEndian.PutUint32(wire[:], address)
	return binary.BigEndian.Uint32(wire[:])
}

// Receive waits for the next commit. It returns ErrOverflow if the kernel dropped a
// commit, or if another process committed after Leave and before Join. It returns
// net.ErrClosed after Close. Receive is for one goroutine; Close, Leave, Join and Miss
// may be called from another.
func (s *Subscription) Receive() (Commit, error) {
	for len(s.pending) == 0 {
		if s.closed.Load() {
			return Commit{}, net.ErrClosed
		}
		if end := s.ended.Load(); end != nil {
			return Commit{}, *end
		}
		messages, err := s.conn.Receive()
		switch {
		case err == nil:
			s.pending = messages
		case errors.Is(err, unix.ENOBUFS):
			s.end(ErrOverflow)
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrClosed):
			s.end(net.ErrClosed)
		default: // a deadline is set by end, which has set its error
			s.end(fmt.Errorf("receiving commits: %w", err))
		}
	}
	m := s.pending[0]
	s.pending = s.pending[1:]
	c, err := parseCommit(m.Data)
	if m.Header.Type != nftType(unix.NFT_MSG_NEWGEN) {
		err = fmt.Errorf("netlink sent a message of type %#x in spite of the filter", uint16(m.Header.Type))
	}
	if err != nil {
		s.pending = nil
		s.end(err)
		return s.Receive()
	}
	c.Own = s.own(m.Header.PID, c.PID)
	return c, nil
}

// end lets Receive return err from now on, unless it has another error already. A
// deadline wakes a waiting Receive.
func (s *Subscription) end(err error) {
	if s.ended.CompareAndSwap(nil, &err) {
		_ = s.conn.SetReadDeadline(time.Now())
	}
}

// Close ends the subscription and lets a waiting Receive return.
func (s *Subscription) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	s.left()
	return s.conn.Close()
}

// Leave stops listening until Join. An error of the kernel does not matter: the
// subscription then only receives more than necessary.
func (s *Subscription) Leave() { _ = s.conn.LeaveGroup(unix.NFNLGRP_NFTABLES) }

// Join listens again after Leave: Mirror.Silently calls it after the user's own write. If
// the kernel refuses, Receive returns that error.
func (s *Subscription) Join() {
	if err := s.conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		s.end(fmt.Errorf("listening to commits again: %w", err))
	}
}

// Miss lets Receive return ErrOverflow.
func (s *Subscription) Miss() { s.end(ErrOverflow) }

// Subscriptions has one user's open subscriptions. The zero value has none.
type Subscriptions struct {
	mu   sync.Mutex
	open []*Subscription
}

// Subscribe opens a subscription and keeps it in o until its Close, so that All returns it.
// See the function Subscribe.
func (o *Subscriptions) Subscribe(own func(port, pid uint32) bool) (*Subscription, error) {
	s, err := Subscribe(own)
	if err != nil {
		return nil, err
	}
	s.left = func() { o.remove(s) }
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open = append(o.open, s)
	return s, nil
}

// remove forgets a subscription; its Close calls it.
func (o *Subscriptions) remove(s *Subscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open = slices.DeleteFunc(o.open, func(other *Subscription) bool { return other == s })
}

// All returns the open subscriptions. Mirror.Silently has them leave during a large write of
// canaryd's own.
func (o *Subscriptions) All() []*Subscription {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.open)
}
