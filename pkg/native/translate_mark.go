package native

// A packetMark has the known bits of a packet's mark, in the bytes of a register.
type packetMark struct{ value, known [4]byte }

// or returns the known bits of a mark that is one of two.
func (m packetMark) or(o packetMark) packetMark {
	for i := range m.known {
		m.known[i] &= o.known[i] &^ (m.value[i] ^ o.value[i])
	}
	return m
}

// markIn returns the mark that a register holds.
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
