package native

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/nat"
)

// registers are the registers of nf_tables while a rule is evaluated, as far as they are known.
type registers struct {
	bytes [registersEnd]byte
	known [registersEnd]byte // the bits of each byte that are known
	// among is the number of values, from 0 on, that numgen may have stored in the word at that
	// place. 0: numgen has not stored it.
	among map[int]uint32
	// oneOf has the possible values of the register at that place.
	oneOf map[int][][]byte
}

// registersEnd is the size of struct nft_regs: the verdict's 16 bytes and 64 of data.
const registersEnd = 80

// place returns the offset of a register in registers.bytes; -1 for an unknown register.
// Registers 1 to 4 have 16 bytes and overlap registers 8 to 23, which have 4
// (nft_parse_register, Linux 6.18). All methods of registers call it.
func place(register uint32) int {
	switch {
	case register >= 1 && register <= 4:
		return int(register) * 16
	case register >= 8 && register <= 23:
		return 16 + int(register-8)*4
	}
	return -1
}

// store writes a known value; the rest of its last word is zero. If the value has no place in
// the registers, none of them is known any more.
func (r *registers) store(register uint32, value []byte) {
	at := place(register)
	padded := (len(value) + 3) &^ 3
	if at < 0 || at+padded > registersEnd {
		*r = registers{}
		return
	}
	r.dropNotes(at, at+padded)
	clear(r.bytes[at : at+padded])
	copy(r.bytes[at:], value)
	for i := range padded {
		r.known[at+i] = 0xff
	}
}

// storeBits is store for at most 16 bytes, such as a mark, with some bits not known. A set bit
// in known is known.
func (r *registers) storeBits(register uint32, value, known []byte) {
	r.forget(register)
	if at := place(register); at >= 0 && len(value) <= 16 && at+len(value) <= registersEnd {
		copy(r.bytes[at:], value)
		copy(r.known[at:], known)
	}
}

// bits returns a value and its known bits; nil if the registers do not have that many bytes.
// Both share the registers' memory.
func (r *registers) bits(register uint32, length int) (value, known []byte) {
	at := place(register)
	if at < 0 || length <= 0 || at+length > registersEnd {
		return nil, nil
	}
	return r.bytes[at : at+length : at+length], r.known[at : at+length : at+length]
}

// forget notes that a value is not known, because an expression has written another there. Its
// length is not known either: all bytes behind it are forgotten, too. Without a place for the
// register, none is known any more.
func (r *registers) forget(register uint32) {
	at := place(register)
	if at < 0 {
		*r = registers{}
		return
	}
	r.dropNotes(at, registersEnd)
	clear(r.known[at:])
}

// dropNotes drops the notes of among and oneOf on values that begin in these bytes. The bytes
// before may be the beginning of a value of oneOf: its register has at most 16.
func (r *registers) dropNotes(from, to int) {
	maps.DeleteFunc(r.among, func(at int, _ uint32) bool { return at >= from && at < to })
	maps.DeleteFunc(r.oneOf, func(at int, _ [][]byte) bool { return at > from-16 && at < to })
}

// choose notes that numgen wrote one of the numbers from 0 to among - 1 into a word. A map with
// exactly these keys then certainly has an element. 0: the numbers are not known.
func (r *registers) choose(register, among uint32) {
	r.forget(register)
	if at := place(register); at >= 0 && among > 0 {
		if r.among == nil {
			r.among = map[int]uint32{}
		}
		r.among[at] = among
	}
}

// load returns a value, and whether all of it is known. Without that, a rule that compares it
// may match or not.
func (r *registers) load(register uint32, length int) ([]byte, bool) {
	value, known := r.bits(register, length)
	partly := slices.ContainsFunc(known, func(bits byte) bool { return bits != 0xff })
	return value, value != nil && !partly
}

// choices returns the among that choose has noted for a word; 0 if it has noted none.
func (r *registers) choices(register uint32) uint32 { return r.among[place(register)] }

// chooseValue notes that a register has one of these values: the values of a map that was
// looked up with a number by numgen. translate reads them as the destinations of a DNAT.
func (r *registers) chooseValue(register uint32, values [][]byte) {
	r.forget(register)
	if at := place(register); at >= 0 {
		if r.oneOf == nil {
			r.oneOf = map[int][][]byte{}
		}
		r.oneOf[at] = values
	}
}

// values returns all values that a register may hold, nil if they are not known. Those of a map
// may have another length: translate checks it.
func (r *registers) values(register uint32, length int) [][]byte {
	if value, known := r.load(register, length); known {
		return [][]byte{value}
	}
	return r.oneOf[place(register)]
}

// storeMark stores the known bits of a mark.
func (r *registers) storeMark(register uint32, m nat.Mark) {
	var value, known [4]byte
	binary.NativeEndian.PutUint32(value[:], m.Value)
	binary.NativeEndian.PutUint32(known[:], m.Known)
	r.storeBits(register, value[:], known[:])
}

// mark returns the mark that a register holds. If the register is not known, no bit of the
// mark is.
func (r *registers) mark(register uint32) nat.Mark {
	value, known := r.bits(register, 4)
	if value == nil {
		return nat.Mark{}
	}
	bits := binary.NativeEndian.Uint32(known)
	return nat.Mark{Known: bits, Value: binary.NativeEndian.Uint32(value) & bits}
}
