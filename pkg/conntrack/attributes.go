package conntrack

import (
	"encoding/binary"
	"iter"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const align = 4 // NLMSG_ALIGNTO and NLA_ALIGNTO

// messages yields the netlink messages in a datagram. It stops at one that is longer than the
// rest.
func messages(data []byte) iter.Seq2[unix.NlMsghdr, []byte] {
	return func(yield func(unix.NlMsghdr, []byte) bool) {
		for len(data) >= unix.SizeofNlMsghdr {
			order := nl.NativeEndian()
			h := unix.NlMsghdr{Len: order.Uint32(data), Type: order.Uint16(data[4:]), Flags: order.Uint16(data[6:]), Seq: order.Uint32(data[8:]), Pid: order.Uint32(data[12:])}
			if h.Len < unix.SizeofNlMsghdr || uint64(h.Len) > uint64(len(data)) || !yield(h, data[unix.SizeofNlMsghdr:h.Len]) {
				return
			}
			data = data[min((int(h.Len)+align-1)&^(align-1), len(data)):]
		}
	}
}

// attributes yields the netlink attributes in data, by type without its flags. It stops at one
// that is longer than the rest.
func attributes(data []byte) iter.Seq2[int, []byte] {
	const header = 4 // struct nlattr
	return func(yield func(int, []byte) bool) {
		for len(data) >= header {
			length := int(nl.NativeEndian().Uint16(data))
			kind := nl.NativeEndian().Uint16(data[2:]) & nl.NLA_TYPE_MASK
			if length < header || length > len(data) || !yield(int(kind), data[header:length]) {
				return
			}
			data = data[min((length+align-1)&^(align-1), len(data)):]
		}
	}
}

// appendAttribute appends one attribute with its padding.
func appendAttribute(b []byte, kind int, value []byte) []byte {
	const header = 4 // struct nlattr
	b = native16(b, uint16(header+len(value)))
	b = native16(b, uint16(kind))
	b = append(b, value...)
	for len(b)%align != 0 {
		b = append(b, 0)
	}
	return b
}

// nested appends one attribute that holds others.
func nested(b []byte, kind int, inner []byte) []byte {
	return appendAttribute(b, kind|unix.NLA_F_NESTED, inner)
}

func be16(b []byte) uint16          { return binary.BigEndian.Uint16(b) }
func be32(b []byte) uint32          { return binary.BigEndian.Uint32(b) }
func be64(b []byte) uint64          { return binary.BigEndian.Uint64(b) }
func be32Bytes(n uint32) []byte     { return binary.BigEndian.AppendUint32(nil, n) }
func native32Bytes(n uint32) []byte { return native32(nil, n) }

func native16(b []byte, n uint16) []byte { return binary.NativeEndian.AppendUint16(b, n) }
func native32(b []byte, n uint32) []byte { return binary.NativeEndian.AppendUint32(b, n) }
