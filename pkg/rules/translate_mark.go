package rules

// An nfmark is what is known of a packet's mark: the bits, and their values.
type nfmark struct{ known, value uint32 }

// A marking is what MARK does: it clears the bits of mask and flips those of
// value (struct xt_mark_tginfo2, mark_tg in net/netfilter/xt_mark.c).
type marking struct {
	value, mask uint32
	// unread says that it could not be read: it may set anything.
	unread bool
}

func (m nfmark) set(to marking) nfmark {
	if to.unread {
		return nfmark{}
	}
	known := m.known | to.mask
	return nfmark{known, (m.value&^to.mask ^ to.value) & known}
}

// either returns what is known where a packet has the one mark or the other.
func (m nfmark) either(other nfmark) nfmark {
	known := m.known & other.known &^ (m.value ^ other.value)
	return nfmark{known, m.value & known}
}

// is answers whether the bits of mask are those of value, and no others are set
// in value (mark_mt in net/netfilter/xt_mark.c).
func (m nfmark) compare(value, mask uint32) answer {
	switch {
	case value&^mask != 0 || (m.value^value)&mask&m.known != 0:
		return no
	case mask&^m.known != 0:
		return maybe
	}
	return yes
}
