package native

// A packetMark has the known bits of a packet's mark, in the bytes of a register.
type packetMark struct{ value, known [4]byte }

// or returns the known bits of a mark that is one of two: the bits that both know and have
// alike. The walk calls it where two ways of a packet meet.
func (m packetMark) or(o packetMark) packetMark {
	for i := range m.known {
		m.known[i] &= o.known[i] &^ (m.value[i] ^ o.value[i])
	}
	return m
}

// markIn returns the mark that a register holds, when a rule sets the packet's mark from it. If
// the register is not known, no bit of the mark is.
func markIn(regs *registers, register uint32) (m packetMark) {
	value, known := regs.bits(register, len(m.value))
	copy(m.value[:], value)
	copy(m.known[:], known)
	return m
}

// markWays joins the marks of several ways.
type markWays struct {
	mark packetMark
	any  bool
}

// add joins the mark of one more way. After it, mark has only the bits that all ways have
// alike.
func (w *markWays) add(m packetMark) {
	if w.any {
		m = m.or(w.mark)
	}
	w.mark, w.any = m, true
}

// otherSource notes a way that ends in another source.
func (w *natWalk) otherSource() {
	w.sources++
	w.escapes = w.escapes || !w.leaves // before that, a new source is no destination
}
