package nft

import (
	"bytes"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// This file reads and writes netlink attributes. It treats the kernel's messages
// as hostile: no list of attributes may make these functions panic.

// A StringAttr is an attribute that is a string.
type StringAttr struct {
	Kind  uint16
	Value string
}

// Strings writes attributes that are NUL-terminated strings, for requests. Unlike the
// library's encoder it cannot fail, and probes call it all the time.
func Strings(attrs ...StringAttr) []byte {
	var out []byte
	for _, a := range attrs {
		out = AppendAttr(out, a.Kind, a.Value, 1)
	}
	return out
}

// AppendAttr appends an attribute with its padding. zeros is the number of NULs behind the
// value: 1 for a string of netlink, else 0.
func AppendAttr[T string | []byte](out []byte, kind uint16, value T, zeros int) []byte {
	out = binary.NativeEndian.AppendUint16(out, uint16(4+len(value)+zeros))
	out = binary.NativeEndian.AppendUint16(out, kind)
	out = append(append(out, value...), make([]byte, zeros)...)
	return append(out, make([]byte, -len(out)&3)...) // to a multiple of NLA_ALIGNTO
}

var ErrAttribute = errors.New("a netlink attribute is longer than its container, or too short")

// nlaTypeMask clears NLA_F_NESTED and NLA_F_NET_BYTEORDER in an attribute's type.
const nlaTypeMask = 0x3fff

// NextAttr splits the first attribute, with its padding, from list. The error means that
// list is empty or damaged. The library's decoder would allocate for each of the half
// million attributes of 46,578 rules.
func NextAttr(list []byte) (kind uint16, data, rest []byte, err error) {
	if len(list) < unix.SizeofNlAttr {
		return 0, nil, nil, ErrAttribute
	}
	size := int(binary.NativeEndian.Uint16(list))
	if size < unix.SizeofNlAttr || size > len(list) {
		return 0, nil, nil, ErrAttribute
	}
	kind = binary.NativeEndian.Uint16(list[2:]) & nlaTypeMask
	// The last attribute may lack its padding.
	padded := min((size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(list))
	return kind, list[unix.SizeofNlAttr:size], list[padded:], nil
}

// EachAttr calls f for each attribute of list, until f returns an error. It returns that
// error, or ErrAttribute for a damaged list. An iterator would allocate memory for each
// list.
func EachAttr(list []byte, f func(kind uint16, value []byte) error) error {
	for len(list) > 0 {
		kind, value, rest, err := NextAttr(list)
		if err == nil {
			err = f(kind, value)
		}
		if err != nil {
			return err
		}
		list = rest
	}
	return nil
}

// eachAttrOf calls f for each attribute of a message, after its struct nfgenmsg. The parsers
// of messages use it; the error is f's, or says that the message is damaged.
func eachAttrOf(message []byte, f func(kind uint16, value []byte) error) error {
	if len(message) < nfgenmsgLen {
		return errShort
	}
	return EachAttr(message[nfgenmsgLen:], f)
}

// AttrOf returns the value of the list's first attribute of that kind, nil if there is none.
// The error means that the list is damaged.
func AttrOf(list []byte, wanted uint16) ([]byte, error) {
	for len(list) > 0 {
		kind, value, rest, err := NextAttr(list)
		if err != nil {
			return nil, err
		}
		if kind == wanted {
			return value, nil
		}
		list = rest
	}
	return nil, nil
}

// AttrPath returns a nested attribute: the first of the first kind in list, in it
// the first of the second kind, and so on. It returns nil if one is missing or
// damaged.
func AttrPath(list []byte, kinds ...uint16) []byte {
	for _, kind := range kinds {
		value, err := AttrOf(list, kind)
		if err != nil || value == nil {
			return nil
		}
		list = value
	}
	return list
}

// noNumber is a value that no attribute read by AttrNumber has.
const noNumber = ^uint32(0)

// AttrNumber returns an attribute's number of 32 bits; noNumber if there is none, which no
// attribute read by it has.
func AttrNumber(list []byte, kind uint16) uint32 {
	n, err := AttrUint32(AttrPath(list, kind))
	if err != nil {
		return noNumber
	}
	return n
}

// AttrUint32 reads a number of 32 bits, in network byte order. Another length is
// ErrAttribute.
func AttrUint32(value []byte) (uint32, error) {
	if len(value) != 4 {
		return 0, ErrAttribute
	}
	return binary.BigEndian.Uint32(value), nil
}

// AttrUint64 reads a number of 64 bits, in network byte order. Another length is
// ErrAttribute.
func AttrUint64(value []byte) (uint64, error) {
	if len(value) != 8 {
		return 0, ErrAttribute
	}
	return binary.BigEndian.Uint64(value), nil
}

// UntilNUL returns the bytes before the first NUL, or all.
func UntilNUL(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}

// String returns the string before the first NUL.
func String(b []byte) string { return string(UntilNUL(b)) }
