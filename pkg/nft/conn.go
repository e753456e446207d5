package nft

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Conn sends requests to nf_tables through one lasting netlink connection. No
// request creates anything. A Conn may be used concurrently.
type Conn struct {
	mu     sync.Mutex // one request and its answers at a time
	conn   *netlink.Conn
	buffer []byte // of messageBuffer bytes
	// torn: answers to earlier requests may still arrive. An old answer "no such
	// chain" must never be taken for an answer about another chain.
	torn bool
}

// messageBuffer holds the largest datagram of a dump: the kernel limits it to 32
// KiB (netlink_dump). A fixed buffer saves a system call for each answer.
const messageBuffer = 64 << 10

// Dial opens a connection. It needs no privilege; requests may need
// CAP_NET_ADMIN.
func Dial() (*Conn, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageBuffer})
	if err != nil {
		return nil, Wrap("opening a netlink socket", err)
	}
	return &Conn{conn: conn, buffer: make([]byte, messageBuffer)}, nil
}

// DialIfAny is Dial and a request for the genid, for callers that treat a kernel
// without nf_tables like one without tables. On such a kernel the connection is
// nil.
func DialIfAny() (conn *Conn, genid uint32, err error) {
	if conn, err = Dial(); err == nil {
		if genid, err = conn.Genid(); err == nil {
			return conn, genid, nil
		}
		_ = conn.Close() // only read from
	}
	if errors.Is(err, ErrNone) {
		err = nil
	}
	return nil, 0, err
}

// whole replaces a torn connection, so that no answer to an earlier request can arrive. send
// calls it before each request, with c.mu held.
func (c *Conn) whole() error {
	if !c.torn {
		return nil
	}
	fresh, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageBuffer})
	if err != nil {
		return Wrap("opening a netlink socket again", err)
	}
	old := c.conn
	c.conn, c.torn = fresh, false
	return old.Close()
}

// Close ends the connection.
func (c *Conn) Close() error { return c.conn.Close() }

// Genid returns the ruleset counter of this network namespace, which both
// families share. It also is the cheapest check that nf_tables exists and may be
// read.
func (c *Conn) Genid() (uint32, error) {
	var id uint32
	err := c.each(unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, nil, func(m netlink.Message) error {
		commit, err := parseCommit(m.Data)
		id = commit.Genid
		return err
	})
	// EINVAL is nfnetlink's answer for a subsystem that does not exist.
	if errors.Is(err, unix.EINVAL) {
		return 0, ErrNone
	}
	return id, Wrap("asking for the ruleset's counter", err)
}

// HasChain reports whether a chain exists; a chain of a missing table does not. canaryd
// looks so for its own canary and for owners' chains.
func (c *Conn) HasChain(family tableid.Family, table, chain string) (bool, error) {
	return c.exists(unix.NFT_MSG_GETCHAIN, family,
		StringAttr{unix.NFTA_CHAIN_TABLE, table},
		StringAttr{unix.NFTA_CHAIN_NAME, chain})
}

// HasTable reports whether a table exists.
func (c *Conn) HasTable(family tableid.Family, table string) (bool, error) {
	return c.exists(unix.NFT_MSG_GETTABLE, family, StringAttr{unix.NFTA_TABLE_NAME, table})
}

func (c *Conn) exists(message uint16, family tableid.Family, attrs ...StringAttr) (bool, error) {
	found, err := c.one(message, family, attrs, func([]byte) error { return nil })
	return found, Wrap(fmt.Sprintf("asking for %q", attrs[len(attrs)-1].Value), err)
}

// one requests one object and calls f with the answer's data, for Chain, Table, Object and
// exists. It is false if the object does not exist.
func (c *Conn) one(message uint16, family tableid.Family, attrs []StringAttr, f func(data []byte) error) (bool, error) {
	err := c.each(message, family, Strings(attrs...), func(m netlink.Message) error { return f(m.Data) })
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// each sends one request and calls f for every answer. It streams the answers:
// 60,000 rules in one slice would need more memory than all of canaryd.
func (c *Conn) each(message uint16, family tableid.Family, attrs []byte, f func(netlink.Message) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	sent, err := c.send(message, netlink.Request, family, attrs)
	if err != nil {
		return err
	}
	for m, err := range c.conn.ReceiveIter() {
		if err == nil && m.Header.Sequence != sent.Header.Sequence {
			err = fmt.Errorf("netlink answered request %d, not %d", m.Header.Sequence, sent.Header.Sequence)
		}
		if err == nil {
			err = f(m)
		}
		if err != nil {
			c.torn = !refusal(err)
			return err
		}
	}
	return nil
}

// send sends one request. No answers to earlier requests can arrive after it.
// c.mu must be held.
func (c *Conn) send(message uint16, flags netlink.HeaderFlags, family tableid.Family, attrs []byte) (netlink.Message, error) {
	if err := c.whole(); err != nil {
		return netlink.Message{}, err
	}
	return c.conn.Send(netlink.Message{
		Header: netlink.Header{Type: nftType(message), Flags: flags},
		Data:   append([]byte{uint8(family), unix.NFNETLINK_V0, 0, 0}, attrs...),
	})
}

// refusal reports whether the error is the kernel's answer, rather than a missing answer,
// which makes the connection torn. The library wraps errors of system calls.
func refusal(err error) bool {
	var op *netlink.OpError
	if !errors.As(err, &op) {
		return false
	}
	_, answer := op.Err.(syscall.Errno)
	return answer
}
