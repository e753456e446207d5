package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

const (
	soSetReplace     = 64 // IPT_SO_SET_REPLACE
	soSetAddCounters = 65 // IPT_SO_SET_ADD_COUNTERS

	xtReplaceHeadLen  = 96 // sizeof(struct ipt_replace) without its entries, 64-bit
	xtCountersHeadLen = 40 // offsetof(struct xt_counters_info, counters)
	xtCounterLen      = 16 // sizeof(struct xt_counters)
)

// canReplace reports whether this program can replace a table: struct ipt_replace contains an
// address of 64 bits.
func canReplace() bool { return unsafe.Sizeof(uintptr(0)) == 8 }

// replace replaces a whole table or nothing; place calls it. blob has the entries, behind room
// for struct ipt_replace. replace adds to each entry the count of the entry with its former number
// (was), as iptables-legacy does. The error is nft.ErrStale if the number of entries has changed
// since the read (before). The kernel compares nothing else: call it right after the read.
func (s *xtSocket) replace(before, now xtInfo, blob []byte, was []int) error {
	counters := make([]byte, int(before.entries)*xtCounterLen)
	copy(blob, before.raw[:xtTableNameLen])
	put := func(at int, value uint32) { binary.NativeEndian.PutUint32(blob[at:], value) }
	put(32, now.validHooks)
	put(36, now.entries)
	put(40, now.size)
	for i := range now.hookEntry {
		put(44+4*i, now.hookEntry[i])
		put(64+4*i, now.underflow[i])
	}
	put(84, before.entries)
	var pin runtime.Pinner // the kernel writes to counters by its address
	defer pin.Unpin()
	pin.Pin(unsafe.SliceData(counters))
	binary.NativeEndian.PutUint64(blob[88:], uint64(uintptr(unsafe.Pointer(unsafe.SliceData(counters)))))
	if err := s.setsockopt(soSetReplace, blob); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			err = nft.ErrStale
		}
		return fmt.Errorf("replacing it: %w", err)
	}
	added := make([]byte, xtCountersHeadLen, xtCountersHeadLen+len(was)*xtCounterLen)
	copy(added, before.raw[:xtTableNameLen])
	binary.NativeEndian.PutUint32(added[32:], now.entries)
	for _, n := range was {
		if n < 0 {
			added = append(added, make([]byte, xtCounterLen)...)
		} else {
			added = append(added, counters[n*xtCounterLen:(n+1)*xtCounterLen]...)
		}
	}
	_ = s.setsockopt(soSetAddCounters, added) // after an error the rules count from 0
	return nil
}

// setsockopt writes to x_tables, for replace.
func (s *xtSocket) setsockopt(option uintptr, buf []byte) error {
	return s.retried(func(level uintptr) error {
		_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(s.fd), level, option,
			uintptr(unsafe.Pointer(unsafe.SliceData(buf))), uintptr(len(buf)), 0)
		if errno != 0 {
			return errno
		}
		return nil
	})
}
