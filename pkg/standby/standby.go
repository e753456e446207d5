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

// These errors say why there is no standby, if the reason suggests a remedy. nft.ErrPermission and
// nft.ErrNone are others.
var (
	// ErrKernel: the kernel has no tables with an owner (before Linux 5.12), or lacks nat chains.
	ErrKernel = errors.New("the kernel cannot hold a standby")
	// ErrTaken: another process has a table of the standby's name. It may be a canaryd that has
	// just ended: the kernel removes its table soon.
	ErrTaken = errors.New("another process has a table of the standby's name")
	// ErrMemory: the kernel has no memory for the table, perhaps because of a limit of canaryd's
	// own control group.
	ErrMemory = errors.New("there is no memory for the standby")
	// ErrOutdated: the copy was made from an earlier copy that the kernel no longer has. Translate
	// it again, with Standby.Held.
	ErrOutdated = errors.New("the copy does not match the rules in the kernel")
	// ErrNotBuilt: there is no table whose hooks could be opened.
	ErrNotBuilt = errors.New("no standby is built")
)

// TableName is the beginning of the names of a Standby's tables.
const TableName = "canaryd-standby"

// NameOf returns the name of the copy's table; id is the real table. The copy of nat has
// TableName itself. Logs name it, too.
func NameOf(id tableid.TableID) string {
	if id.Name == "nat" {
		return TableName
	}
	return TableName + "-" + id.Name
}

// A Config controls how a Standby writes. The zero value is ready for use.
type Config struct {
	// GateMost bounds the rules of a copy whose base chains have their rules all the time, behind a
	// gate of one set. In a larger copy, these rules are added when a hook is opened. 0:
	// DefaultGateMost; negative: never a gate.
	GateMost int
	// Misses is the group of a Misses, for packets that the real nat table did not translate; 0: no
	// rule logs them. Copies of native tables log none.
	Misses uint16
	// Piece bounds a transaction while the copy is built, in bytes, where the socket allows it. 0:
	// 1 MiB.
	Piece int
	// Room returns how many bytes of memory this process and the kernel on its behalf may still
	// use; nil: there is no limit. A table that needs more is not built: the kernel would not
	// refuse the transaction, but kill the process whose control group is full.
	Room func() int64
}

// DefaultGateMost is far above the 41,434 rules of 5,000 services. There opening took the processor
// 0.7 to 2.6 ms behind a gate, and 35 to 38 ms without one. The kernel walks all chains when a jump
// is added. Following a change took 39 to 45 ms behind a gate and 13 to 22 ms without (Linux 6.18,
// a busy machine). Changes are followed once a second. When a hook is opened, outstanding changes
// have been translated before. Only a change of a native table is translated then.
const DefaultGateMost = 100_000

// A Status is the state of one table of a Standby.
type Status struct {
	Built bool
	// Open are the open hooks, in the packets' order.
	Open    []Hook
	Chains  int
	LeftOut int           // chains that became "accept"
	Bytes   int           // of the last build or change, as sent
	Took    time.Duration // the kernel's time for it
}

// A Standby has copies in the kernel, by one lasting socket. It sends its commits from Port. All
// methods may be called concurrently. Methods that write wait for each other. The others do not
// wait for the kernel, and nor does an opening by knocking.
type Standby struct {
	cfg Config
	// writing is held for a whole change of a table, and mu for access to the fields. send gives mu
	// back while the kernel handles a transaction. A goroutine locks writing before mu.
	writing sync.Mutex
	mu      sync.Mutex
	fd      int
	closed  bool
	port    atomic.Uint32
	conn    *nft.Conn
	// commits counts the transactions that the kernel has accepted.
	commits atomic.Uint64
	tables  map[tableid.TableID]*table
	// left are tables that the kernel did not delete. They take no copy, and must be deleted first.
	left  map[tableid.TableID]*table
	names int // the names that setName has given
	// building are the first builds in progress.
	building map[tableid.TableID]*building
	// sending, for tests, runs before each transaction, while mu is free.
	sending func()
}

// dialTries bounds the addresses that are tried: one address in a billion is taken by chance.
const dialTries = 4

// Dial opens the socket. It writes nothing. The kernel removes all tables when the socket is
// closed or the process ends. canaryd dials again after Shut or Remove had to close it.
func Dial(cfg Config) (*Standby, error) {
	cfg.GateMost, cfg.Piece = cmp.Or(cfg.GateMost, DefaultGateMost), cmp.Or(cfg.Piece, 1<<20)
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

// smallPiece is the piece of a socket whose buffer may not be raised: net.core.wmem_max is 212,992
// by default.
const smallPiece = 150 << 10

// Port returns the netlink address from which the Standby sends its transactions.
func (s *Standby) Port() uint32 { return s.port.Load() }

// Commits returns how many of the Standby's transactions the kernel has accepted. Each increased
// the genid by one.
func (s *Standby) Commits() uint64 { return s.commits.Load() }

// Close closes the socket, and the kernel removes all tables. That takes 14, 29 and 70 ms at
// 100, 1,000 and 5,000 services. The Standby cannot be used again; its Put returns
// net.ErrClosed.
func (s *Standby) Close() error {
	defer s.lock()()
	return s.close()
}

// lock locks the Standby for a change of a table, and returns the function that unlocks it.
func (s *Standby) lock() (unlock func()) {
	s.writing.Lock()
	s.mu.Lock()
	return func() { s.mu.Unlock(); s.writing.Unlock() }
}

// close is Close for a caller that has locked s. remove calls it if the kernel does not delete a
// table with open hooks.
func (s *Standby) close() error {
	if s.closed {
		return nil
	}
	for id := range s.building {
		_ = s.giveUp(id) // the socket's end removes the rest
	}
	s.closed = true
	clear(s.tables)
	clear(s.left)
	return errors.Join(unix.Close(s.fd), s.conn.Close())
}

// Put writes the copy's table into the kernel. It builds a new table in pieces, and writes only the
// difference into an existing table. Open hooks stay open. After an error of a first build there is
// no table. After an error of a change the table is unchanged or gone: Status says which. The error
// is net.ErrClosed after Close.
func (s *Standby) Put(c *Copy) error {
	for {
		more, err := s.PutPiece(c)
		if err != nil || !more {
			return err
		}
	}
}

// PutPiece is Put that returns after each transaction of a build. more: call it again, with this
// copy or a newer one. Status says when there is a table. A native table that cannot be changed is
// removed first, and the next call begins to build it.
func (s *Standby) PutPiece(c *Copy) (more bool, err error) {
	defer s.lock()()
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

// Held returns the kernel's copy, for Translate; nil if nothing is built. Its chains have
// digests, but no rules.
func (s *Standby) Held(id tableid.TableID) *Copy {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.tables[id]; t != nil {
		return t.held
	}
	return nil
}

// Open opens hooks, in one transaction with the changes of pending that the kernel lacks. If
// pending is nil, a packet opens a hook behind a gate where that is possible. It waits for no
// transaction, not even for one of this Standby, and changes no genid. Open hooks stay open. If
// pending cannot be written, no hook is opened. The caller may open without pending then, but the
// copy is out of date. Copy.Openable says which hooks to open. The kernel shuts a hook behind a
// gate after 32 s if canaryd does not.
func (s *Standby) Open(id tableid.TableID, hooks []Hook, pending *Copy) error {
	knocked := errNoKnock
	if pending == nil {
		if knocked = s.openByKnock(id, hooks); knocked == nil {
			return nil
		}
	}
	defer s.lock()()
	t := s.tables[id]
	switch {
	case t == nil:
		return ErrNotBuilt
	case pending != nil && pending.native != nil:
		return s.openNative(t, hooks, pending)
	}
	closed := t.closed(hooks)
	err := s.open(t, hooks, pending)
	if err == nil || errors.Is(knocked, errNoKnock) {
		return err
	}
	t.opened(closed, t.held) // some may be open
	return errors.Join(err, knocked, s.shutOrRemove(t, closed))
}

// Shut shuts all hooks of a table; without a table there is nothing to shut. If the kernel refuses,
// the table is removed. If the kernel refuses that too, the socket is closed with all tables. So no
// hook stays open. After that dial again.
func (s *Standby) Shut(id tableid.TableID) error {
	defer s.lock()()
	t := s.tables[id]
	if t == nil || len(t.open) == 0 {
		return nil
	}
	return s.shutOrRemove(t, t.openHooks())
}

// Remove removes a table, open or not, built or not. After an error the table exists and takes no
// copy: Remove and the next build try it again.
func (s *Standby) Remove(id tableid.TableID) error {
	defer s.lock()()
	if err := s.giveUp(id); err != nil {
		return err
	}
	if t := cmp.Or(s.tables[id], s.left[id]); t != nil {
		return s.remove(t)
	}
	return nil
}

// OpenHooks returns the open hooks of a table, in the packets' order. It sends no request, so
// it does not notice that a gate's element has expired.
func (s *Standby) OpenHooks(id tableid.TableID) []Hook {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tables[id].openHooks()
}

// Status returns the state of a table. It sends no request, and counts all chains: 3 ms at 5,000
// services.
func (s *Standby) Status(id tableid.TableID) Status {
	st, held := s.status(id)
	if held != nil {
		st.Chains, _ = held.Counts()
		st.LeftOut = len(held.LeftOut())
	}
	return st
}

// status is the part of Status that needs s.mu, and the copy for the rest.
func (s *Standby) status(id tableid.TableID) (Status, *Copy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tables[id]
	if t == nil {
		return Status{}, nil
	}
	return Status{Built: true, Open: t.openHooks(), Bytes: t.bytes, Took: t.took}, t.held
}

// send sends one finished transaction of a table, by the socket that owns it. All writes go
// through it, so it counts commits, bytes and time. The error says why the kernel refused, as
// refused does. The caller has locked s. Meanwhile hooks may be opened by knocking.
func (s *Standby) send(t *table, b *nft.Batch) error {
	b.Finish()
	nft.ForgetComplaints(s.fd)
	s.mu.Unlock()
	if s.sending != nil {
		s.sending()
	}
	err := b.SendFrom(s.fd)
	s.mu.Lock()
	if err == nil {
		s.commits.Add(1)
	}
	t.bytes, t.took = t.bytes+b.Bytes(), t.took+b.Took
	return refused(t.name, err)
}

// refused returns an error that says why the kernel refused a transaction: ErrMemory, ErrTaken,
// or the kernel's own. name is the table's; without err it returns nil.
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
