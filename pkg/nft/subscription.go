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

// subscriptionBuffer is the receive buffer that is asked for, in bytes. The
// kernel charges about 768 bytes for each 56-byte message; the filter drops
// all other messages before they count.
const subscriptionBuffer = 1 << 20

// A Subscription receives one Commit for each transaction that any process commits
// to nf_tables in this network namespace, its user's own included, while it listens.
// Commits from before Subscribe are not seen: subscribe first, then look.
type Subscription struct {
	conn    *netlink.Conn
	own     func(port, pid uint32) bool
	left    func()            // is told of Close
	pending []netlink.Message // received with others, not yet returned
	closed  atomic.Bool
	missed  atomic.Bool // it did not listen when somebody else committed
	deaf    atomic.Bool // it will not hear any more
}

// Subscribe opens a subscription; own says of a commit's netlink address and process whether it is
// its user's. It needs CAP_NET_ADMIN.
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

// begin sets the filter before it joins the group, so that nothing unwanted
// ever enters the buffer.
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
// 20,000 rules is 26,666 messages and overflows the default buffer; a genid
// comes in a datagram of its own (nf_tables_gen_notify), so nothing is lost
// by looking at a datagram's first message only.
func onlyNewgen() []bpf.Instruction {
	// The type stands at offset 4 in the machine's byte order, and BPF loads
	// in network order.
	var wire [2]byte
	binary.NativeEndian.PutUint16(wire[:], uint16(nftType(unix.NFT_MSG_NEWGEN)))
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(binary.BigEndian.Uint16(wire[:])), SkipFalse: 1},
		bpf.RetConstant{Val: 0xffff},
		bpf.RetConstant{Val: 0},
	}
}

// errDeaf: a socket that did not listen for a while does not listen again.
var errDeaf = errors.New("the kernel does not let a socket listen to commits again")

// Receive waits for the next commit. It returns ErrOverflow if the kernel had
// to drop some, or one was missed, after which it may be called again, and
// net.ErrClosed after Close. It is for one goroutine; Close may be called from
// another.
func (s *Subscription) Receive() (Commit, error) {
	for len(s.pending) == 0 {
		if s.closed.Load() {
			return Commit{}, net.ErrClosed
		}
		if s.deaf.Load() {
			return Commit{}, errDeaf
		}
		if s.missed.Swap(false) {
			return Commit{}, s.drain()
		}
		messages, err := s.conn.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return Commit{}, s.drain()
		}
		if errors.Is(err, os.ErrDeadlineExceeded) { // woken, see wake
			if err = s.conn.SetReadDeadline(time.Time{}); err == nil {
				continue
			}
		}
		if err != nil {
			return Commit{}, s.receiveError(err)
		}
		s.pending = messages
	}
	m := s.pending[0]
	s.pending = s.pending[1:]
	if m.Header.Type != nftType(unix.NFT_MSG_NEWGEN) {
		return Commit{}, fmt.Errorf("netlink sent a message of type %#x in spite of the filter", uint16(m.Header.Type))
	}
	c, err := parseCommit(m.Data)
	c.Own = s.own(m.Header.PID, c.PID)
	return c, err
}

const (
	drainIdle = time.Millisecond       // the buffer counts as empty after this
	drainMost = 100 * time.Millisecond // so that Receive returns beside a busy writer
)

// drain empties the buffer before an overflow is reported. Until it is empty
// the kernel drops every further message without another ENOBUFS
// (NETLINK_S_CONGESTED, af_netlink.c): who looked at the tables earlier could
// miss a commit of which no message comes any more.
func (s *Subscription) drain() error {
	for end := time.Now().Add(drainMost); time.Now().Before(end); {
		if err := s.conn.SetReadDeadline(time.Now().Add(drainIdle)); err != nil {
			return s.receiveError(err)
		}
		messages, err := s.conn.Receive()
		s.pending = append(s.pending, messages...)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return s.receiveError(err)
		}
	}
	if err := s.conn.SetReadDeadline(time.Time{}); err != nil {
		return s.receiveError(err)
	}
	return ErrOverflow
}

func (s *Subscription) receiveError(err error) error {
	switch {
	case s.closed.Load() || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed):
		return net.ErrClosed
	default:
		return fmt.Errorf("receiving commits: %w", err)
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

// Leave lets the subscription hear nothing for a while. Whether that works decides
// about time only.
func (s *Subscription) Leave() { _ = s.conn.LeaveGroup(unix.NFNLGRP_NFTABLES) }

// Join ends that. One that cannot listen any more says so.
func (s *Subscription) Join() {
	if err := s.conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		s.deaf.Store(true)
		s.wake()
	}
}

// wake lets a Receive that waits look around: at what was set before.
func (s *Subscription) wake() { _ = s.conn.SetReadDeadline(time.Now()) }

// Miss lets Receive return ErrOverflow.
func (s *Subscription) Miss() {
	s.missed.Store(true)
	s.wake()
}

// Subscriptions are those of one user that are open. The zero value is none.
type Subscriptions struct {
	mu   sync.Mutex
	open []*Subscription
}

// Subscribe opens a subscription, which is one of them until its Close.
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

func (o *Subscriptions) remove(s *Subscription) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.open = slices.DeleteFunc(o.open, func(other *Subscription) bool { return other == s })
}

// All returns those that are open.
func (o *Subscriptions) All() []*Subscription {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.open)
}
