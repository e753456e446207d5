package native

import "slices"

// registers are the registers of nf_tables while a rule is evaluated, as far as they are known.
type oldRegisters struct {
	bytes [oldRegistersEnd]byte
	known [oldRegistersEnd]byte // the bits of each byte that are known
	// among is the number of values, from 0 on, that numgen may have stored in the word at that
	// place. 0: numgen has not stored it.
	among map[int]uint32
	// oneOf has the possible values of the register at that place.
	oneOf map[int][][]byte
}

// registersEnd is the size of struct nft_regs: the verdict's 16 bytes and 64 of data.
const oldRegistersEnd = 80

// place returns the offset of a register in registers.bytes; -1 for an unknown register.
// Registers 1 to 4 have 16 bytes and overlap registers 8 to 23, which have 4
// (nft_parse_register, Linux 6.18). All methods of registers call it.
func oldPlace(register uint32) int {
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
func (r *oldRegisters) store(register uint32, value []byte) {
	at := oldPlace(register)
	padded := (len(value) + 3) &^ 3
	if at < 0 || at+padded > oldRegistersEnd {
		*r = oldRegisters{}
		return
	}
	delete(r.among, at)
	delete(r.oneOf, at)
	clear(r.bytes[at : at+padded])
	copy(r.bytes[at:], value)
	for i := range padded {
		r.known[at+i] = 0xff
	}
}

// storeBits is store for at most 16 bytes, such as a mark, with some bits not known. A set bit
// in known is known.
func (r *oldRegisters) storeBits(register uint32, value, known []byte) {
	r.forget(register)
	if at := oldPlace(register); at >= 0 && len(value) <= 16 && at+len(value) <= oldRegistersEnd {
		copy(r.bytes[at:], value)
		copy(r.known[at:], known)
	}
}

// bits returns a value and its known bits; nil if the registers do not have that many bytes.
// Both share the registers' memory.
func (r *oldRegisters) bits(register uint32, length int) (value, known []byte) {
	at := oldPlace(register)
	if at < 0 || length <= 0 || at+length > oldRegistersEnd {
		return nil, nil
	}
	return r.bytes[at : at+length : at+length], r.known[at : at+length : at+length]
}

// forget notes that a value of up to 16 bytes is not known, because an expression has written
// another there. Without a place for the register, none is known any more.
func (r *oldRegisters) forget(register uint32) {
	at := oldPlace(register)
	if at < 0 {
		*r = oldRegisters{}
		return
	}
	delete(r.among, at)
	delete(r.oneOf, at)
	clear(r.known[at:min(at+16, oldRegistersEnd)])
}

// choose notes that numgen wrote one of the numbers from 0 to among - 1 into a word. A map with
// exactly these keys then certainly has an element. 0: the numbers are not known.
func (r *oldRegisters) choose(register, among uint32) {
	r.forget(register)
	if at := oldPlace(register); at >= 0 && among > 0 {
		if r.among == nil {
			r.among = map[int]uint32{}
		}
		r.among[at] = among
	}
}

// load returns a value, and whether all of it is known. Without that, a rule that compares it
// may match or not.
func (r *oldRegisters) load(register uint32, length int) ([]byte, bool) {
	value, known := r.bits(register, length)
	partly := slices.ContainsFunc(known, func(bits byte) bool { return bits != 0xff })
	return value, value != nil && !partly
}

// choices returns the among that choose has noted for a word; 0 if it has noted none.
func (r *oldRegisters) choices(register uint32) uint32 { return r.among[oldPlace(register)] }

// chooseValue notes that a register has one of these values: the values of a map that was
// looked up with a number by numgen. elsewhere reads them as the addresses of a DNAT.
func (r *oldRegisters) chooseValue(register uint32, values [][]byte) {
	r.forget(register)
	if at := oldPlace(register); at >= 0 {
		if r.oneOf == nil {
			r.oneOf = map[int][][]byte{}
		}
		r.oneOf[at] = values
	}
}

// values returns all values that a register may hold, nil if they are not known. elsewhere
// checks that each of them is another destination.
func (r *oldRegisters) values(register uint32, length int) [][]byte {
	if value, known := r.load(register, length); known {
		return [][]byte{value}
	}
	var all [][]byte
	for _, value := range r.oneOf[oldPlace(register)] {
		if len(value) < length {
			return nil
		}
		all = append(all, value[:length])
	}
	return all
}
