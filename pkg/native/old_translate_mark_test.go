package native

// A packetMark has the known bits of a packet's mark, in the bytes of a register.
type oldPacketMark struct{ value, known [4]byte }

// or returns the known bits of a mark that is one of two: the bits that both know and have
// alike. The walk calls it where two ways of a packet meet.
func (m oldPacketMark) or(o oldPacketMark) oldPacketMark {
	for i := range m.known {
		m.known[i] &= o.known[i] &^ (m.value[i] ^ o.value[i])
	}
	return m
}

// markIn returns the mark that a register holds, when a rule sets the packet's mark from it. If
// the register is not known, no bit of the mark is.
func oldMarkIn(regs *oldRegisters, register uint32) (m oldPacketMark) {
	value, known := regs.bits(register, len(m.value))
	copy(m.value[:], value)
	copy(m.known[:], known)
	return m
}

// markWays joins the marks of several ways.
type oldMarkWays struct {
	mark oldPacketMark
	any  bool
}

// add joins the mark of one more way. After it, mark has only the bits that all ways have
// alike.
func (w *oldMarkWays) add(m oldPacketMark) {
	if w.any {
		m = m.or(w.mark)
	}
	w.mark, w.any = m, true
}

// otherSource notes a way that ends in another source.
func (w *oldNatWalk) otherSource() {
	w.sources++
	w.escapes = w.escapes || !w.leaves // before that, a new source is no destination
}
