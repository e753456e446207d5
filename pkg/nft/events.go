package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// eventBuffer is the receive buffer that is asked for, in bytes. The user
// empties it at each read only; a restore of 20,000 rules is 9.6 MB of
// notifications. What is too much costs a full read, and nothing else. Without
// CAP_NET_ADMIN in the first user namespace it becomes as large as
// net.core.rmem_max allows.
const eventBuffer = 8 << 20

// An Event is one notification of nf_tables'. Its slices are valid until
// the next one is received.
type Event struct {
	Kind   uint16 // NFT_MSG_NEWRULE and the like
	Family tableid.Family
	Table  []byte
	Chain  []byte // of a rule, or the chain itself
	Handle uint64 // of a chain
	Append bool   // of a new rule: see Notification
	Data   []byte // of a rule or a chain: all that is said of it
	By     Commit // of a NEWGEN, which ends what is said of a commit
}

// Events hear of every change that is committed to nf_tables in this
// network namespace. Unlike a Subscription they are not waited for: the kernel
// keeps the notifications until they are wanted. They are for one goroutine.
type Events struct {
	conn   *netlink.Conn
	buffer []byte
	own    func(port, pid uint32) bool // whether a commit is ours
	// heard is the genid up to which everything was heard.
	heard uint32
}

// OpenEvents begins to hear. It joins the group before it asks genid for where it begins. own says
// of a commit's netlink address and process whether it is the user's own. It needs CAP_NET_ADMIN.
func OpenEvents(genid func() (uint32, error), own func(port, pid uint32) bool) (*Events, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, Wrap("opening a netlink socket", err)
	}
	e := &Events{conn: conn, buffer: make([]byte, messageBuffer), own: own}
	if err = conn.SetReadBuffer(eventBuffer); err == nil {
		err = conn.JoinGroup(unix.NFNLGRP_NFTABLES)
	}
	if err == nil {
		e.heard, err = genid()
	}
	if err != nil {
		return nil, errors.Join(Wrap("subscribing to changes", err), conn.Close())
	}
	return e, nil
}

// Close ends the events.
func (e *Events) Close() error { return e.conn.Close() }

// UpTo returns the genid up to which everything was heard.
func (e *Events) UpTo() uint32 { return e.heard }

// SkipTo takes everything up to genid for heard, by a caller who knows what it changed.
func (e *Events) SkipTo(genid uint32) { e.heard = genid }

// Drain calls f for all that was heard until now.
func (e *Events) Drain(f func(Event)) error {
	return e.drain(func(datagram []byte) error { return e.take(datagram, f) })
}

func (e *Events) drain(take func(datagram []byte) error) error {
	for {
		datagram, err := receive(e.conn, e.buffer, false)
		if err != nil {
			return fmt.Errorf("receiving changes: %w", err)
		}
		if datagram == nil {
			return nil
		}
		if err := take(datagram); err != nil {
			return err
		}
	}
}

// A Notification is a message as it came, for callers who read all kinds of objects. Its slice is
// valid until the next one is received.
type Notification struct {
	Kind   uint16 // NFT_MSG_NEWRULE and the like
	Family tableid.Family
	Attrs  []byte
	Append bool   // of a new rule: it was appended, or replaced another one
	By     Commit // of a NEWGEN, which ends what is said of a commit

	message    []byte // with the header of its attributes
	packetPath bool   // no commit is the reason
}

// DrainAll calls f for every notification of a commit that was heard until now. After an error,
// an overflow included, it may be called again for those that follow.
func (e *Events) DrainAll(f func(Notification) error) error {
	return e.drain(func(datagram []byte) error {
		return e.each(datagram, func(n Notification) error {
			if n.packetPath {
				return nil // a quota is used up
			}
			return f(n)
		})
	})
}

// each calls f for every notification of nf_tables' in a datagram.
func (e *Events) each(datagram []byte, f func(Notification) error) error {
	return eachMessage(datagram, func(m []byte) error {
		kind, data := binary.NativeEndian.Uint16(m[4:]), m[unix.SizeofNlMsghdr:]
		if kind>>8 != unix.NFNL_SUBSYS_NFTABLES {
			return nil
		}
		if len(data) < nfgenmsgLen {
			return errShort
		}
		sequence, port := binary.NativeEndian.Uint32(m[8:]), binary.NativeEndian.Uint32(m[12:])
		n := Notification{Kind: kind & 0xff, Family: tableid.Family(data[0]), Attrs: data[nfgenmsgLen:],
			Append:  binary.NativeEndian.Uint16(m[6:])&unix.NLM_F_APPEND != 0,
			message: data, packetPath: sequence == 0 && port == 0}
		if n.Kind == unix.NFT_MSG_NEWGEN {
			var err error
			if n.By, err = parseCommit(data); err != nil {
				return err
			}
			n.By.Own = e.own(port, n.By.PID)
			e.heard = n.By.Genid
		}
		return f(n)
	})
}

// Wait calls f for all that is heard until the end of commit genid; false if
// that did not come until the deadline.
func (e *Events) Wait(genid uint32, deadline time.Time, f func(Event)) (bool, error) {
	if err := e.Drain(f); err != nil {
		return false, err
	}
	for !e.has(genid) {
		if err := e.conn.SetReadDeadline(deadline); err != nil {
			return false, err
		}
		datagram, err := receive(e.conn, e.buffer, true)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false, e.conn.SetReadDeadline(time.Time{})
		}
		if err != nil {
			return false, fmt.Errorf("receiving changes: %w", err)
		}
		if err := e.take(datagram, f); err != nil {
			return false, err
		}
	}
	return true, e.conn.SetReadDeadline(time.Time{})
}

// has reports whether everything up to genid was heard. The counter wraps.
func (e *Events) has(genid uint32) bool { return !Newer(genid, e.heard) }

func (e *Events) take(datagram []byte, f func(Event)) error {
	return e.each(datagram, func(n Notification) error {
		event, err := n.event()
		if err == nil && (event.Kind == unix.NFT_MSG_NEWGEN || event.Family != 0) {
			f(event)
		}
		return err
	})
}

// event reads what an Event has of a notification. The family is 0 of a NEWGEN, and of sets,
// objects and flow tables, of which nothing is said yet.
func (n Notification) event() (e Event, err error) {
	e = Event{Kind: n.Kind, Family: n.Family, Append: n.Append, By: n.By}
	switch n.Kind {
	case unix.NFT_MSG_NEWGEN:
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		e.Table, err = nameOf(n.Attrs, unix.NFTA_TABLE_NAME)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		if e.Table, err = nameOf(n.Attrs, unix.NFTA_CHAIN_TABLE); err != nil {
			break
		}
		if e.Chain, err = nameOf(n.Attrs, unix.NFTA_CHAIN_NAME); err != nil {
			break
		}
		var handle []byte
		if handle, err = AttrOf(n.Attrs, unix.NFTA_CHAIN_HANDLE); err == nil && handle != nil {
			e.Handle, err = AttrUint64(handle)
		}
		e.Data = n.message
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		if e.Table, err = nameOf(n.Attrs, unix.NFTA_RULE_TABLE); err == nil {
			e.Chain, err = nameOf(n.Attrs, unix.NFTA_RULE_CHAIN)
		}
		e.Data = n.message
	default: // sets, objects, flow tables
		return Event{}, nil
	}
	return e, err
}

// nameOf returns an attribute that is a string and must be there.
func nameOf(attrs []byte, kind uint16) ([]byte, error) {
	value, err := AttrOf(attrs, kind)
	if err == nil && value == nil {
		err = fmt.Errorf("a notification lacks attribute %d", kind)
	}
	return UntilNUL(value), err
}

// Leave lets the events hear nothing for a while: what is committed then is missed.
func (e *Events) Leave() error { return e.conn.LeaveGroup(unix.NFNLGRP_NFTABLES) }

// Join ends what Leave began.
func (e *Events) Join() error { return e.conn.JoinGroup(unix.NFNLGRP_NFTABLES) }
