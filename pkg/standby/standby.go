package standby

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Why there is no standby, as far as that says what to do. nft.ErrPermission and nft.ErrNone are
// others.
var (
	// ErrKernel: the kernel has no tables with an owner (before Linux 5.12), or lacks nat chains.
	ErrKernel = errors.New("the kernel cannot hold a standby")
	// ErrTaken: another process has a table of the standby's name. A canaryd that ended this
	// moment may be that process: the kernel removes its table soon.
	ErrTaken = errors.New("another process has a table of the standby's name")
	// ErrMemory: the kernel has no memory for it, perhaps because of a limit of canaryd's own
	// control group.
	ErrMemory = errors.New("there is no memory for the standby")
	// ErrOutdated: the copy was made from an earlier one that is not what the kernel holds.
	// Translate it again, with Standby.Held.
	ErrOutdated = errors.New("the copy does not match the rules in the kernel")
	// ErrNotBuilt: there is nothing that could be opened.
	ErrNotBuilt = errors.New("no standby is built")
)

// TableName begins the names of a Standby's tables.
const TableName = "canaryd-standby"

// NameOf returns the name of the copy's table: that of nat is TableName itself.
func NameOf(id tableid.TableID) string {
	if id.Name == "nat" {
		return TableName
	}
	return TableName + "-" + id.Name
}

// A Config says how a Standby writes. The zero value is ready for use.
type Config struct {
	// Unheard calls write, which sends one large transaction, while canaryd does not listen to
	// the kernel's notifications; nil: it is simply called. Transactions of few messages do
	// without.
	Unheard func(write func() error) error
	// GateMost is up to how many rules a copy's base chains hold their rules all the time, behind
	// a gate of one set. Above, their rules are added when a hook is opened. 0: DefaultGateMost;
	// negative: never a gate.
	GateMost int
	// Misses is the group of a Misses, which is to hear of packets that the real nat table did not
	// translate; 0: no rule logs them. Those of copies of native tables do not.
	Misses uint16
	// Piece is how large a transaction may become while the copy is built, in bytes, where the
	// socket allows it. 0: 1 MiB.
	Piece int
	// Room returns how many bytes of memory this process and the kernel on its behalf may still
	// use; nil: as many as they want. A table that needs more is not built: the kernel would kill
	// the process whose control group is full, and not refuse the transaction.
	Room func() int64
}

// DefaultGateMost is far above the 41,434 rules of 5,000 services. There opening took the processor
// 0.7 to 2.6 ms behind a gate and 35 to 38 ms without one, for the kernel walks all chains when a
// jump is added; following a change took 39 to 45 ms behind a gate and 13 to 22 ms without (Linux
// 6.18, a busy machine). Changes are followed once a second, and what is outstanding when a hook is
// to be opened has been translated before; only a change of a native table is translated then.
const DefaultGateMost = 100_000

// A Status is what is known of one table of a Standby.
type Status struct {
	Built bool
	// Open are the hooks that are open, in the packets' order.
	Open    []Hook
	Chains  int
	LeftOut int           // chains that became "accept"
	Bytes   int           // of the last build or change, as sent
	Took    time.Duration // of the kernel for it
}

// A Standby holds copies in the kernel, by one lasting socket. Its commits come from Port. All
// methods may be called concurrently; they wait for each other.
type Standby struct {
	cfg    Config
	mu     sync.Mutex
	fd     int
	closed bool
	port   atomic.Uint32
	conn   *nft.Conn
	// commits are the transactions that the kernel has taken.
	commits atomic.Uint64
	tables  map[tableid.TableID]*table
	// left are tables that the kernel did not delete: they take no copy, and go first.
	left  map[tableid.TableID]*table
	names int // that setName has given
	// building are the first builds that are under way.
	building map[tableid.TableID]*building
}

// dialTries is how many addresses are tried: one of a billion is taken by chance.
const dialTries = 4

// Dial opens the socket. It writes nothing. The kernel removes all tables when the socket is
// closed or the process ends.
func Dial(cfg Config) (*Standby, error) {
	cfg.GateMost, cfg.Piece = cmp.Or(cfg.GateMost, DefaultGateMost), cmp.Or(cfg.Piece, 1<<20)
	if cfg.Unheard == nil {
		cfg.Unheard = func(write func() error) error { return write() }
	}
	conn, err := nft.Dial()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, errors.Join(nft.Wrap("opening the standby's netlink socket", err), conn.Close())
	}
	s := &Standby{cfg: cfg, fd: fd, conn: conn, tables: map[tableid.TableID]*table{}, left: map[tableid.TableID]*table{},
		building: map[tableid.TableID]*building{}}
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1) // see nft.Batch.Send
	for range dialTries {
		port := nft.NewPort()
		if err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}); err == nil {
			s.port.Store(port)
			break
		}
	}
	if err != nil {
		return nil, errors.Join(nft.Wrap("binding the standby's netlink socket", err), unix.Close(fd), conn.Close())
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, cfg.Piece) != nil {
		s.cfg.Piece = min(cfg.Piece, smallPiece)
	}
	return s, nil
}

// smallPiece is what a socket may send whose buffer may not be raised: net.core.wmem_max is 212,992
// by default.
const smallPiece = 150 << 10

// Port returns the netlink address that the Standby's transactions come from.
func (s *Standby) Port() uint32 { return s.port.Load() }

// Commits returns how many of the Standby's transactions the kernel has taken: each moved the genid
// by one.
func (s *Standby) Commits() uint64 { return s.commits.Load() }

// Close closes the socket, and the kernel removes all tables: 14, 29 and 70 ms at 100, 1,000 and
// 5,000 services. The Standby cannot be used again.
func (s *Standby) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.close()
}

// close is Close; s.mu must be held.
func (s *Standby) close() error {
	if s.closed {
		return nil
	}
	for id := range s.building {
		_ = s.giveUp(id) // what stays goes with the socket
	}
	s.closed = true
	clear(s.tables)
	clear(s.left)
	return errors.Join(unix.Close(s.fd), s.conn.Close())
}

// Put brings the table of the copy into the kernel: it builds it in pieces, or writes what is
// another in the table that is there. Hooks that are open stay open. After an error of a first
// build there is no table; after one of a change the table is what it was, or gone: Status says
// which. The error is net.ErrClosed after Close.
func (s *Standby) Put(c *Copy) error {
	for {
		more, err := s.PutPiece(c)
		if err != nil || !more {
			return err
		}
	}
}

// PutPiece is Put that returns after each transaction of a build. With more it is to be called
// again, with this copy or a newer one. Status says when there is a table: a native one that cannot
// be changed goes first, and the next call begins to build it.
func (s *Standby) PutPiece(c *Copy) (more bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false, net.ErrClosed
	}
	t := s.tables[c.ID]
	switch {
	case t == nil:
		return s.step(c)
	case c.native != nil:
		return s.putNative(c)
	}
	return false, s.follow(t, c)
}

// Held returns what the kernel holds, for Translate; nil if nothing is built.
func (s *Standby) Held(id tableid.TableID) *Copy {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.tables[id]; t != nil {
		return t.held
	}
	return nil
}

// Open opens hooks, in one transaction with what pending has that the kernel has not yet; pending
// may be nil. Without it a hook behind a gate is opened by a packet where that can be, which waits
// for no other process's transaction, and moves no genid. Hooks that are open stay so. If pending
// cannot be written, nothing is opened. The caller may open without it then: what translates is out
// of date. Copy.Openable says which hooks to open. A hook behind a gate the kernel shuts after 32 s
// if nothing else does.
func (s *Standby) Open(id tableid.TableID, hooks []Hook, pending *Copy) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[id]
	switch {
	case t == nil:
		return ErrNotBuilt
	case pending != nil && pending.native != nil:
		return s.openNative(t, hooks, pending)
	case pending == nil && t.gated && t.held.hooks[Output] != nil:
		return s.openByKnock(t, hooks)
	}
	return s.open(t, hooks, pending)
}

// Shut shuts all hooks of a table; without a table there is nothing to shut. If the kernel does
// not do it, the table is removed, and if it does not do that either, the socket is closed with all
// tables: no hook stays open. After that dial again.
func (s *Standby) Shut(id tableid.TableID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[id]
	if t == nil || len(t.open) == 0 {
		return nil
	}
	return s.shutOrRemove(t, t.openHooks())
}

// Remove removes a table, open or not, built or not. After an error it stands and takes no copy:
// Remove and the next build try it again.
func (s *Standby) Remove(id tableid.TableID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.giveUp(id); err != nil {
		return err
	}
	if t := cmp.Or(s.tables[id], s.left[id]); t != nil {
		return s.remove(t)
	}
	return nil
}

// OpenHooks returns the hooks of a table that are open, in the packets' order. It asks nothing.
func (s *Standby) OpenHooks(id tableid.TableID) []Hook {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tables[id].openHooks()
}

// Status returns what is known of a table. It asks nothing, and counts all chains: 3 ms at 5,000
// services.
func (s *Standby) Status(id tableid.TableID) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[id]
	if t == nil {
		return Status{}
	}
	st := Status{Built: true, Open: t.openHooks(), LeftOut: len(t.held.LeftOut()), Bytes: t.bytes, Took: t.took}
	st.Chains, _ = t.held.Counts()
	return st
}

// send sends one finished transaction. s.mu must be held.
func (s *Standby) send(t *table, b *nft.Batch) error {
	b.Finish()
	nft.ForgetComplaints(s.fd)
	write := func() error { return b.SendFrom(s.fd) }
	var err error
	if b.Messages() > unheardFrom {
		err = s.cfg.Unheard(write)
	} else {
		err = write()
	}
	if err == nil {
		s.commits.Add(1)
	}
	t.bytes, t.took = t.bytes+b.Bytes(), t.took+b.Took
	return refused(t.name, err)
}

// unheardFrom is from how many messages on a transaction is sent while canaryd does not listen, as
// a replay is.
const unheardFrom = 512

// refused says why the kernel took nothing of a transaction.
func refused(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
		return fmt.Errorf("%w (table %s: %w)", ErrMemory, name, err)
	case errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%w (table %s: %w)", ErrTaken, name, err)
	}
	return fmt.Errorf("writing table %s: %w", name, err)
}
