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

// A Conn asks nf_tables through one lasting netlink connection. Nothing
// that it asks creates anything. It may be used concurrently.
type Conn struct {
	mu     sync.Mutex // one request and its answers at a time
	conn   *netlink.Conn
	buffer []byte // of messageBuffer bytes
	// torn: answers to earlier questions may still come. That an old one is "no
	// such chain" must never be taken for the answer about another.
	torn bool
}

// messageBuffer holds the largest datagram of a dump, which the kernel bounds
// at 32 KiB (netlink_dump). A fixed buffer saves a system call for each answer.
const messageBuffer = 64 << 10

// Dial opens a connection. It needs no privilege; what is asked may need CAP_NET_ADMIN.
func Dial() (*Conn, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: messageBuffer})
	if err != nil {
		return nil, Wrap("opening a netlink socket", err)
	}
	return &Conn{conn: conn, buffer: make([]byte, messageBuffer)}, nil
}

// DialIfAny is Dial that asks for the genid, for callers to whom a kernel without nf_tables is one
// without tables: the connection is nil then.
func DialIfAny() (conn *Conn, genid uint32, err error) {
	if conn, err = Dial(); err == nil {
		if genid, err = conn.Genid(); err == nil {
			return conn, genid, nil
		}
		_ = conn.Close() // it was read from only
	}
	if errors.Is(err, ErrNone) {
		err = nil
	}
	return nil, 0, err
}

// whole makes sure that no answers to earlier questions can come.
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
// families share. It also is the cheapest question to learn whether nf_tables
// exists and may be asked.
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

// HasChain reports whether a chain exists; a chain of a missing table does not.
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

// one asks for one object and calls f with the answer's data; false if the object does not exist.
func (c *Conn) one(message uint16, family tableid.Family, attrs []StringAttr, f func(data []byte) error) (bool, error) {
	err := c.each(message, family, Strings(attrs...), func(m netlink.Message) error { return f(m.Data) })
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, err
}

// each sends one request and calls f for every answer. Answers are streamed:
// 60,000 rules in one slice would be more memory than all of canaryd.
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

// send sends one request; no answers to earlier ones can come then. c.mu must be held.
func (c *Conn) send(message uint16, flags netlink.HeaderFlags, family tableid.Family, attrs []byte) (netlink.Message, error) {
	if err := c.whole(); err != nil {
		return netlink.Message{}, err
	}
	return c.conn.Send(netlink.Message{
		Header: netlink.Header{Type: nftType(message), Flags: flags},
		Data:   append([]byte{uint8(family), unix.NFNETLINK_V0, 0, 0}, attrs...),
	})
}

// refusal reports whether the error is the kernel's answer to a question, and not
// that there was none. The library wraps what a system call returned.
func refusal(err error) bool {
	var op *netlink.OpError
	if !errors.As(err, &op) {
		return false
	}
	_, answer := op.Err.(syscall.Errno)
	return answer
}
