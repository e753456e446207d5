package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// eventBuffer is the requested size of the receive buffer, in bytes. The user
// empties the buffer only at each read, and a restore of 20,000 rules sends 9.6
// MB of notifications. An overflow costs a full read, and nothing else. Without
// CAP_NET_ADMIN in the first user namespace net.core.rmem_max limits the buffer.
const eventBuffer = 8 << 20

// An Event is one notification of nf_tables. Its slices are valid until the next
// Event is received.
type Event struct {
	Kind   uint16 // NFT_MSG_NEWRULE and the like
	Family tableid.Family
	Table  []byte
	Chain  []byte // of a rule, or the chain itself
	Handle uint64 // of a chain
	Append bool   // of a new rule: see Notification
	Data   []byte // of a rule or a chain: the whole message
	By     Commit // of a NEWGEN, which ends the notifications of a commit
}

// Events receive every change that is committed to nf_tables in this network
// namespace. The user of a Subscription waits for commits; of Events the kernel
// keeps the notifications until the user reads them. Events are for one
// goroutine.
type Events struct {
	conn   *netlink.Conn
	buffer []byte
	own    func(port, pid uint32) bool // whether a commit is the user's
	muted  func() uint32
	mute   uint32 // the address that the socket's filter mutes; 0: there is no filter
	// heard is the genid up to which everything was received.
	heard uint32
}

// OpenEvents begins to receive, for a mirror or for native tables. It joins the group before
// it calls genid for its starting point (UpTo). own reports whether a commit's netlink
// address and process are the user's. muted returns a netlink address of the user's whose
// commits are received as ends only, without their changes; 0, or a nil muted: none. OpenEvents
// needs CAP_NET_ADMIN.
func OpenEvents(genid func() (uint32, error), own func(port, pid uint32) bool, muted func() uint32) (*Events, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, Wrap("opening a netlink socket", err)
	}
	e := &Events{conn: conn, buffer: make([]byte, messageBuffer), own: own, muted: muted}
	if err = errors.Join(conn.SetReadBuffer(eventBuffer), e.filter()); err == nil {
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

// filter keeps the changes of the muted address out of the socket's buffer; only NEWGEN passes.
// All messages in a datagram are of one commit (nft_commit_notify). drain calls it again, because
// the address may change.
func (e *Events) filter() error {
	if e.muted == nil || e.muted() == e.mute {
		return nil
	}
	mute := e.muted()
	// The address is at offset 12 of a message, the type at offset 4: see onlyNewgen.
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 12, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded32(mute), SkipFalse: 3},
		bpf.LoadAbsolute{Off: 4, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: newgenAsLoaded(), SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: wholeDatagram},
	})
	if err == nil {
		err = e.conn.SetBPF(filter)
	}
	if err != nil {
		return Wrap("filtering the notifications of the standby's table", err)
	}
	e.mute = mute
	return nil
}

// Close ends the events.
func (e *Events) Close() error { return e.conn.Close() }

// UpTo returns the genid up to which everything was received.
func (e *Events) UpTo() uint32 { return e.heard }

// SkipTo takes everything up to genid as received. The caller must know these
// changes.
func (e *Events) SkipTo(genid uint32) { e.heard = genid }

// Drain calls f for every change that arrived until now.
func (e *Events) Drain(f func(Event)) error {
	return e.drain(func(datagram []byte) error { return e.take(datagram, f) })
}

// drain calls take for each datagram that arrived until now, and does not wait. Its errors
// are take's, or a failed reception such as an overflow.
func (e *Events) drain(take func(datagram []byte) error) error {
	if err := e.filter(); err != nil {
		return err
	}
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

// A Notification is an unparsed message, for callers that read all kinds of
// objects. Its slice is valid until the next message is received.
type Notification struct {
	Kind   uint16 // NFT_MSG_NEWRULE and the like
	Family tableid.Family
	Attrs  []byte
	Append bool   // of a new rule: it was appended, or replaced another one
	By     Commit // of a NEWGEN, which ends the notifications of a commit

	message    []byte // with the header of its attributes
	packetPath bool   // no commit caused it
}

// DrainAll calls f for every notification of a commit that arrived until now.
// After an error, even an overflow, it may be called again for the next
// notifications.
func (e *Events) DrainAll(f func(Notification) error) error {
	return e.drain(func(datagram []byte) error {
		return e.each(datagram, func(n Notification) error {
			if n.packetPath {
				return nil // the notification of an exhausted quota
			}
			return f(n)
		})
	})
}

// each calls f for every message of nf_tables in a datagram. A NEWGEN gets its Commit, and
// moves e.heard. take and DrainAll call it.
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

// Wait calls f for everything that arrives until the end of commit genid; false if that end
// does not arrive before the deadline. Mirror.Listen then reads the tables.
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

// has reports whether everything up to genid was received. The counter wraps.
func (e *Events) has(genid uint32) bool { return !Newer(genid, e.heard) }

// take calls f with the events of a datagram that concern tables, chains, rules or the end
// of a commit. Drain and Wait call it.
func (e *Events) take(datagram []byte, f func(Event)) error {
	return e.each(datagram, func(n Notification) error {
		event, err := n.event()
		if err == nil && (event.Kind == unix.NFT_MSG_NEWGEN || event.Family != 0) {
			f(event)
		}
		return err
	})
}

// event parses the notification into an Event, for take. The family is 0 for a NEWGEN, and
// for sets, objects and flow tables, which an Event does not describe.
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

// nameOf returns a required attribute that is a string; without it event returns the error.
func nameOf(attrs []byte, kind uint16) ([]byte, error) {
	value, err := AttrOf(attrs, kind)
	if err == nil && value == nil {
		err = fmt.Errorf("a notification lacks attribute %d", kind)
	}
	return UntilNUL(value), err
}

// Leave stops receiving for a while: commits in that time are missed.
func (e *Events) Leave() error { return e.conn.LeaveGroup(unix.NFNLGRP_NFTABLES) }

// Join receives again after Leave.
func (e *Events) Join() error { return e.conn.JoinGroup(unix.NFNLGRP_NFTABLES) }
