package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The x_tables socket options, from linux/netfilter_ipv4/ip_tables.h and
// linux/netfilter_ipv6/ip6_tables.h, where they have the same numbers.
const (
	soGetInfo    = 64 // IPT_SO_GET_INFO
	soGetEntries = 65 // IPT_SO_GET_ENTRIES

	xtTableNameLen   = 32 // XT_TABLE_MAXNAMELEN
	xtInfoLen        = 84 // sizeof(struct ipt_getinfo)
	xtEntriesHeadLen = 40 // offsetof(struct ipt_get_entries, entrytable), 64-bit or aligned u64

	// maxEntriesSize bounds the memory that the kernel's answers may need; 20,000 rules are 8.4
	// MB.
	maxEntriesSize = 1 << 30
	// entriesTries bounds the attempts of GET_ENTRIES while the shape changes.
	entriesTries = 20
)

// errNoLegacy: the kernel has no x_tables for a family.
var errNoLegacy = errors.New("the kernel has no legacy iptables (load the module ip_tables, ip6_tables)")

// An xtInfo is struct ipt_getinfo: the shape of one table.
type xtInfo struct {
	raw        [xtInfoLen]byte
	validHooks uint32
	hookEntry  [5]uint32 // offset of each built-in chain's first entry
	underflow  [5]uint32 // and of its last one, the policy
	entries    uint32
	size       uint32 // of the entries, in bytes
}

// An xtSocket queries one family's legacy tables. It may be used concurrently.
type xtSocket struct {
	family rules.Family
	fd     int
	ask    askXT
	mu     sync.Mutex // guards buf
	buf    []byte     // reused by walks of small tables

	namesMu sync.Mutex // guards names
	names   *os.File   // nil until the file existed
}

// openXT opens the socket whose options carry x_tables; any datagram socket of the family is
// suitable. It creates no table. A missing module is no error: then no table is listed, and
// iptables-legacy loads the module at its first write.
func openXT(family rules.Family) (*xtSocket, error) {
	domain := unix.AF_INET
	if family == rules.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: opening an %v socket: %w", ErrNoFamily, family, err)
	}
	s := &xtSocket{family: family, fd: fd, ask: getsockopt}
	err = s.check()
	if errors.Is(err, errNoLegacy) {
		if tables, err2 := s.tables(); err2 == nil && len(tables) == 0 {
			err = nil
		}
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// close closes the socket and the open list of tables.
func (s *xtSocket) close() error {
	err := unix.Close(s.fd)
	s.namesMu.Lock()
	defer s.namesMu.Unlock()
	if s.names != nil {
		err = errors.Join(err, s.names.Close())
	}
	return err
}

// check finds out whether the kernel answers questions about legacy tables, for openXT and
// countLegacy. It sends GET_INFO with a wrong length. The kernel checks privileges first, and
// the length before the table's name: EINVAL means that queries are allowed, and nothing is
// created.
func (s *xtSocket) check() error {
	var one [1]byte
	_, err := s.getsockopt(soGetInfo, one[:])
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("%w: it took a question that is malformed", errStrange)
	}
	if errors.Is(err, errStrange) {
		if tables, err2 := s.tables(); err2 == nil && len(tables) == 0 {
			err = fmt.Errorf("%w: %w", errNoLegacy, err)
		}
	}
	return s.wrap("asking for the legacy tables", err)
}

// tables lists the existing legacy tables, sorted; none if x_tables is not loaded. Every read
// begins with it, because GET_INFO for a table that is not listed would create it.
func (s *xtSocket) tables() ([]rules.TableName, error) {
	text, err := s.readNames()
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // x_tables is not loaded for the family
	}
	if err != nil {
		return nil, s.wrap("listing the legacy tables", err)
	}
	var names []rules.TableName
	for _, name := range strings.Fields(string(text)) {
		names = append(names, rules.TableName(name))
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// readNames returns the kernel's list of legacy tables. The file stays open, because opening it
// in each tick took a seventh of canaryd's processor time at rest.
func (s *xtSocket) readNames() ([]byte, error) {
	s.namesMu.Lock()
	defer s.namesMu.Unlock()
	again := func() ([]byte, error) { return io.ReadAll(io.NewSectionReader(s.names, 0, math.MaxInt64)) }
	if s.names != nil {
		text, err := again()
		if err == nil {
			return text, nil
		}
		_ = s.names.Close() // x_tables was unloaded, and perhaps loaded again
		s.names = nil
	}
	// thread-self, not self: the socket was opened in this thread's network namespace, which in
	// a test may differ from the process's.
	file, err := os.Open("/proc/thread-self/net/" + familyPrefix(s.family) + "_tables_names")
	if err != nil {
		return nil, err
	}
	s.names = file
	return again()
}

// info returns the shape of a listed table (GET_INFO). For a table that is not listed, the
// question would create it.
func (s *xtSocket) info(table rules.TableName) (xtInfo, error) {
	var info xtInfo
	copy(info.raw[:xtTableNameLen-1], table)
	n, err := s.getsockopt(soGetInfo, info.raw[:])
	if err == nil && n != xtInfoLen {
		err = fmt.Errorf("the kernel answered with %d bytes, not %d", n, xtInfoLen)
	}
	if err != nil {
		return xtInfo{}, s.wrap(fmt.Sprintf("asking for table %s", table), err)
	}
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(info.raw[at:]) }
	info.validHooks = u32(32)
	for i := range info.hookEntry {
		info.hookEntry[i] = u32(36 + 4*i)
		info.underflow[i] = u32(56 + 4*i)
	}
	info.entries, info.size = u32(76), u32(80)
	return info, nil
}

// shapes calls f with the shape (GET_INFO) of each existing table, sorted by name. Stamps use
// it, and weigh before a read: it costs little, because it reads no entries. It queries no
// table that is not listed, because that would create the table.
func (s *xtSocket) shapes(f func(rules.TableName, xtInfo)) error {
	tables, err := s.tables()
	if err != nil {
		return err
	}
	for _, table := range tables {
		info, err := s.info(table)
		if err != nil {
			return err
		}
		f(table, info)
	}
	return nil
}

// readsEntries returns the reason why this program cannot read a table's entries, or nil. Open
// refuses such a program. For a 386 program the kernel aligns to 4 bytes where it aligns to 8
// for others.
func readsEntries() error {
	if runtime.GOARCH == "386" {
		return errors.New("a 386 program reads other structures of x_tables than its kernel writes: use a program of the kernel's own architecture, or --backend=nft")
	}
	return nil
}

// walk calls f with the entries of the wanted listed tables; nil wants all. Reads, probes and
// the count of rules use it. The bytes are valid until f returns. A query for a table that is
// not listed would create it.
func (s *xtSocket) walk(ctx context.Context, wanted func(rules.TableName) bool, f func(rules.TableName, xtInfo, []byte) error) error {
	tables, err := s.tables()
	if err != nil {
		return err
	}
	for _, table := range tables {
		if wanted != nil && !wanted(table) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		err := s.entries(table, func(info xtInfo, data []byte) error { return f(table, info, data) })
		if err != nil {
			return err
		}
	}
	return nil
}

// entries calls f with all entries of a listed table, and with the table's shape. Walks use it,
// and xtWrite before it changes a table. It reads again while the table changes; if the
// table never rests, the error wraps unix.EAGAIN. f may use and change the bytes until it
// returns.
func (s *xtSocket) entries(table rules.TableName, f func(xtInfo, []byte) error) error {
	if err := readsEntries(); err != nil {
		return s.wrap(fmt.Sprintf("reading table %s", table), err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var last error
	for range entriesTries {
		info, err := s.info(table)
		if err != nil {
			return err
		}
		err = s.readEntries(table, info.size, func(data []byte) error {
			// With another shape of the same size, the entries would be cut up wrongly. An equal
			// shape afterwards is not enough: the table may have changed and changed back
			// between the questions.
			if now, err := s.info(table); err != nil || now != info || !info.fits(s.family, data) {
				return errors.Join(err, unix.EAGAIN)
			}
			return f(info, data)
		})
		if err == nil {
			return nil
		}
		// EAGAIN: the table's shape changed between the questions.
		if !errors.Is(err, unix.EAGAIN) {
			return s.wrap(fmt.Sprintf("reading table %s", table), err)
		}
		last = err
	}
	return s.wrap(fmt.Sprintf("reading table %s, which keeps changing", table), last)
}

// keptBuffer is the largest buffer that is kept between walks. Above it, each walk maps memory
// and gives it back. 20,000 rules are 8.4 MB, which would be resident for ever for one walk in
// 30 s.
const keptBuffer = 256 << 10

// readEntries sends GET_ENTRIES and calls f with the entries; entries calls it. size is the
// table's, in bytes, from GET_INFO: if it changed since, the error is unix.EAGAIN. s.mu is
// held.
func (s *xtSocket) readEntries(table rules.TableName, size uint32, f func([]byte) error) error {
	if size > maxEntriesSize {
		return fmt.Errorf("table of %d bytes is too large", size)
	}
	need := xtEntriesHeadLen + int(size)
	var buf []byte
	if need <= keptBuffer {
		if cap(s.buf) < need {
			s.buf = make([]byte, need+need/8)
		}
		buf = s.buf[:need]
		// The kernel does not write to gaps, such as those behind the names of targets. An
		// earlier table's bytes in gaps would be part of the digest.
		clear(buf)
	} else {
		var err error
		buf, err = unix.Mmap(-1, 0, need, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			return fmt.Errorf("%d bytes of memory: %w", need, err)
		}
		defer func() { _ = unix.Munmap(buf) }() // fails only for unmapped memory
	}
	copy(buf[:xtTableNameLen-1], table)
	binary.NativeEndian.PutUint32(buf[xtTableNameLen:], size)
	n, err := s.getsockopt(soGetEntries, buf)
	if err != nil {
		return err
	}
	if n != need {
		return fmt.Errorf("the kernel answered with %d bytes, not %d", n, need)
	}
	return f(buf[xtEntriesHeadLen:])
}

// wrap adds the question to an error. Callers decide by nft.ErrPermission (no privileges) and
// errNoLegacy (no x_tables). Any other error means that the content is unknown.
func (s *xtSocket) wrap(doing string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: %s of %v: %w", nft.ErrPermission, doing, s.family, err)
	case errors.Is(err, unix.ENOPROTOOPT):
		return fmt.Errorf("%w: %s of %v: %w", errNoLegacy, doing, s.family, err)
	default:
		return fmt.Errorf("%s of %v: %w", doing, s.family, err)
	}
}
