package ruleset

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// fields reads a list of attributes exactly as the kernel writes it: in the order of their
// kinds, without flags, padded with zeros. Any other list is bad.
type fields struct {
	rest []byte
	bad  bool
}

const anyLength = -1

// bytes returns the content of the next attribute, which must have that kind and, unless
// length is anyLength, that length. If it has not, bytes sets f.bad: the rule has no words.
func (f *fields) bytes(kind uint16, length int) []byte {
	if len(f.rest) < unix.SizeofNlAttr || binary.NativeEndian.Uint16(f.rest[2:]) != kind {
		f.bad = true
		return nil
	}
	size := int(binary.NativeEndian.Uint16(f.rest))
	padded := (size + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
	if size < unix.SizeofNlAttr || padded > len(f.rest) || !allZero(f.rest[size:padded]) ||
		length != anyLength && size != unix.SizeofNlAttr+length {
		f.bad = true
		return nil
	}
	value := f.rest[unix.SizeofNlAttr:size]
	f.rest = f.rest[padded:]
	return value
}

// has reports whether the next attribute is of that kind.
func (f *fields) has(kind uint16) bool {
	return len(f.rest) >= unix.SizeofNlAttr && binary.NativeEndian.Uint16(f.rest[2:]) == kind
}

// done reports whether everything was read.
func (f *fields) done() bool { return !f.bad && len(f.rest) == 0 }

// nested returns the attributes inside the next attribute. They are bad if it is.
func (f *fields) nested(kind uint16) fields {
	value := f.bytes(kind, anyLength)
	return fields{rest: value, bad: f.bad}
}

// value returns the content of an NFTA_DATA_VALUE in the next attribute, for masks and
// compared values. Of another form it returns nil and sets f.bad: the rule has no words.
func (f *fields) value(kind uint16, length int) []byte {
	data := f.nested(kind)
	value := data.bytes(unix.NFTA_DATA_VALUE, length)
	if !data.done() {
		f.bad = true
		return nil
	}
	return value
}

// text returns a string that has a single zero, at its end. Of another form it returns ""
// and sets f.bad: the rule has no words.
func (f *fields) text(kind uint16) string {
	value := f.bytes(kind, anyLength)
	text, rest, ended := bytes.Cut(value, []byte{0})
	if !ended || len(rest) > 0 {
		f.bad = true
		return ""
	}
	return string(text)
}

// number returns a number of 32 bits. If the next attribute is none, it sets f.bad and
// returns all ones, which no caller takes for a known value.
func (f *fields) number(kind uint16) uint32 {
	if value := f.bytes(kind, 4); value != nil {
		return binary.BigEndian.Uint32(value)
	}
	return ^uint32(0)
}

// number64 returns a number of 64 bits. If the next attribute is none, it sets f.bad and
// returns all ones.
func (f *fields) number64(kind uint16) uint64 {
	if value := f.bytes(kind, 8); value != nil {
		return binary.BigEndian.Uint64(value)
	}
	return ^uint64(0)
}

// allZero reports whether all bytes are zero. It is true for an empty slice.
func allZero(data []byte) bool {
	for _, b := range data {
		if b != 0 {
			return false
		}
	}
	return true
}

// allOnes reports whether each bit of the bytes is set.
func allOnes(data []byte) bool {
	for _, b := range data {
		if b != 0xff {
			return false
		}
	}
	return true
}

// untilZero returns the text before the first zero, if all bytes behind it are zero too.
func untilZero(data []byte) (text []byte, ended bool) {
	text, rest, ended := bytes.Cut(data, []byte{0})
	return text, ended && allZero(rest)
}
