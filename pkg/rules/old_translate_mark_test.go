package rules

// An nfmark is the known part of a packet's mark: the known bits, and their values.
type oldNfmark struct{ known, value uint32 }

// A marking is the effect of the target MARK. It clears the bits of mask and flips the bits of
// value (struct xt_mark_tginfo2; mark_tg in net/netfilter/xt_mark.c).
type oldMarking struct {
	value, mask uint32
	// unread says that the option could not be read: the mark is unknown afterwards.
	unread bool
}

// set returns the mark behind a MARK with this effect. Bits that it sets are known from then
// on. walk.target calls it.
func (m oldNfmark) set(to oldMarking) oldNfmark {
	if to.unread {
		return oldNfmark{}
	}
	known := m.known | to.mask
	return oldNfmark{known, (m.value&^to.mask ^ to.value) & known}
}

// either returns the bits that are known if a packet has either of two marks.
func (m oldNfmark) either(other oldNfmark) oldNfmark {
	known := m.known & other.known &^ (m.value ^ other.value)
	return oldNfmark{known, m.value & known}
}

// compare answers whether the mark's bits of mask equal value, for a test of the walk; maybe
// if some are unknown. A value with bits outside of mask equals no mark (mark_mt in
// net/netfilter/xt_mark.c).
func (m oldNfmark) compare(value, mask uint32) oldAnswer {
	switch {
	case value&^mask != 0 || (m.value^value)&mask&m.known != 0:
		return oldNo
	case mask&^m.known != 0:
		return oldMaybe
	}
	return oldYes
}
