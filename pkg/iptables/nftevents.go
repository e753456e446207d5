package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// eventBuffer is the receive buffer that is asked for, in bytes. The mirror
// empties it at each read only; a restore of 20,000 rules is 9.6 MB of
// notifications. What is too much costs a full read, and nothing else.
const eventBuffer = 8 << 20

// An nftEvent is one notification of nf_tables'. Its slices are valid until
// the next one is received.
type nftEvent struct {
	kind   uint16 // NFT_MSG_NEWRULE and the like
	family rules.Family
	table  []byte
	chain  []byte // of a rule, or the chain itself
	handle uint64 // of a chain
	data   []byte // of a deleted rule: all that is said of it
	by     Commit // of a NEWGEN, which ends what is said of a commit
}

// An nftEvents hears of every change that is committed to nf_tables in this
// network namespace. Unlike a Subscription it is not waited for: the kernel
// keeps the notifications until they are wanted. It is for one goroutine.
type nftEvents struct {
	conn   *netlink.Conn
	buffer []byte
	own    func(port, pid uint32) bool // whether a commit is ours
	// heard is the genid up to which everything was heard.
	heard uint32
}

// openEvents joins the group before it asks genid for where it begins.
func openEvents(genid func() (uint32, error), own func(port, pid uint32) bool) (*nftEvents, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, nftError("opening a netlink socket", err)
	}
	e := &nftEvents{conn: conn, buffer: make([]byte, messageBuffer), own: own}
	if err = e.grow(); err == nil {
		err = conn.JoinGroup(unix.NFNLGRP_NFTABLES)
	}
	if err == nil {
		e.heard, err = genid()
	}
	if err != nil {
		return nil, errors.Join(nftError("subscribing to changes", err), conn.Close())
	}
	return e, nil
}

func (e *nftEvents) close() error { return e.conn.Close() }

// grow enlarges the receive buffer. Without CAP_NET_ADMIN in the first user
// namespace it becomes as large as net.core.rmem_max allows.
func (e *nftEvents) grow() error {
	raw, err := e.conn.SyscallConn()
	if err != nil {
		return err
	}
	var forced error
	if err := raw.Control(func(fd uintptr) {
		forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer)
	}); err != nil {
		return err
	}
	if errors.Is(forced, syscall.EPERM) {
		return e.conn.SetReadBuffer(eventBuffer)
	}
	return forced
}

// drain calls f for all that was heard until now.
func (e *nftEvents) drain(f func(nftEvent)) error {
	for {
		datagram, err := receive(e.conn, e.buffer, false)
		if err != nil {
			return fmt.Errorf("receiving changes: %w", err)
		}
		if datagram == nil {
			return nil
		}
		if err := e.take(datagram, f); err != nil {
			return err
		}
	}
}

// wait calls f for all that is heard until the end of commit genid; false if
// that did not come until the deadline.
func (e *nftEvents) wait(genid uint32, deadline time.Time, f func(nftEvent)) (bool, error) {
	if err := e.drain(f); err != nil {
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
func (e *nftEvents) has(genid uint32) bool { return int32(e.heard-genid) >= 0 }

func (e *nftEvents) take(datagram []byte, f func(nftEvent)) error {
	return eachMessage(datagram, func(m []byte) error {
		event, err := parseEvent(binary.NativeEndian.Uint16(m[4:]), m[unix.SizeofNlMsghdr:])
		if err != nil {
			return err
		}
		switch {
		case event.kind == unix.NFT_MSG_NEWGEN:
			event.by.Own = e.own(binary.NativeEndian.Uint32(m[12:]), event.by.PID)
			e.heard = event.by.Genid
			f(event)
		case event.family != 0:
			f(event)
		}
		return nil
	})
}

// parseEvent reads a notification. The family is 0 of a NEWGEN, and if the event is
// of no interest.
func parseEvent(kind uint16, data []byte) (e nftEvent, err error) {
	if kind>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return nftEvent{}, nil
	}
	if len(data) < nfgenmsgLen {
		return nftEvent{}, errShort
	}
	e.kind = kind & 0xff
	attrs := data[nfgenmsgLen:]
	if e.kind == unix.NFT_MSG_NEWGEN {
		e.by, err = parseCommit(data)
		return e, err
	}
	switch data[0] {
	case unix.NFPROTO_IPV4:
		e.family = rules.IPv4
	case unix.NFPROTO_IPV6:
		e.family = rules.IPv6
	default:
		return nftEvent{}, nil
	}
	switch e.kind {
	case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
		e.table, err = nameOf(attrs, unix.NFTA_TABLE_NAME)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		if e.table, err = nameOf(attrs, unix.NFTA_CHAIN_TABLE); err != nil {
			break
		}
		if e.chain, err = nameOf(attrs, unix.NFTA_CHAIN_NAME); err != nil {
			break
		}
		var handle []byte
		if handle, err = attrOf(attrs, unix.NFTA_CHAIN_HANDLE); err == nil && handle != nil {
			e.handle, err = attrUint64(handle)
		}
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		if e.table, err = nameOf(attrs, unix.NFTA_RULE_TABLE); err == nil {
			e.chain, err = nameOf(attrs, unix.NFTA_RULE_CHAIN)
		}
		if e.kind == unix.NFT_MSG_DELRULE {
			e.data = data
		}
	default: // sets, objects, flow tables
		return nftEvent{}, nil
	}
	return e, err
}

// nameOf returns an attribute that is a string and must be there.
func nameOf(attrs []byte, kind uint16) ([]byte, error) {
	value, err := attrOf(attrs, kind)
	if err == nil && value == nil {
		err = fmt.Errorf("a notification lacks attribute %d", kind)
	}
	return untilNUL(value), err
}
