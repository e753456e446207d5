package rules

// An nfmark is the known part of a packet's mark: the known bits, and their values.
type nfmark struct{ known, value uint32 }

// A marking is the effect of the target MARK. It clears the bits of mask and flips the bits of
// value (struct xt_mark_tginfo2; mark_tg in net/netfilter/xt_mark.c).
type marking struct {
	value, mask uint32
	// unread says that the option could not be read: the mark is unknown afterwards.
	unread bool
}

// set returns the mark behind a MARK with this effect. Bits that it sets are known from then
// on. walk.target calls it.
func (m nfmark) set(to marking) nfmark {
	if to.unread {
		return nfmark{}
	}
	known := m.known | to.mask
	return nfmark{known, (m.value&^to.mask ^ to.value) & known}
}

// either returns the bits that are known if a packet has either of two marks.
func (m nfmark) either(other nfmark) nfmark {
	known := m.known & other.known &^ (m.value ^ other.value)
	return nfmark{known, m.value & known}
}

// compare answers whether the mark's bits of mask equal value, for a test of the walk; maybe
// if some are unknown. A value with bits outside of mask equals no mark (mark_mt in
// net/netfilter/xt_mark.c).
func (m nfmark) compare(value, mask uint32) answer {
	switch {
	case value&^mask != 0 || (m.value^value)&mask&m.known != 0:
		return no
	case mask&^m.known != 0:
		return maybe
	}
	return yes
}
