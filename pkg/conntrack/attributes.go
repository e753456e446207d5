package conntrack

import (
	"encoding/binary"
	"iter"

	"github.com/vishvananda/netlink/nl"
)

// attributes yields the netlink attributes in data, by type without its flags.
// It stops at one that is longer than what is left.
func attributes(data []byte) iter.Seq2[int, []byte] {
	const header, align = 4, 4 // struct nlattr, NLA_ALIGNTO
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

func be16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
func be32(b []byte) uint32 { return binary.BigEndian.Uint32(b) }
