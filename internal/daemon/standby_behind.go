package daemon

import (
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// This file says how far a copy is behind what ought to be in force.

// behind returns how many chains of what ought to be in force the copy lacks, or has otherwise. It
// counts again only for another edition of the generation.
func (s *standbyOf) behind(want rules.Section, edition int) int {
	if s.counted == edition {
		return s.outstanding
	}
	s.counted, s.outstanding = edition, 0
	has := make(map[string]rules.Chain, len(s.section.Chains))
	for _, c := range s.section.Chains {
		has[c.Name] = c
	}
	for _, c := range want.Chains {
		if was, ok := has[c.Name]; !ok || !sameChain(was, c) {
			s.outstanding++
		}
		delete(has, c.Name)
	}
	s.outstanding += len(has)
	return s.outstanding
}

// tooOld reports whether all that could be opened is behind what ought to be in force for longer
// than standbyMost: an owner may have removed what it still has.
func (s *standbyOf) tooOld(want rules.Section, g *generation, now time.Time) bool {
	return s.latestLag.tooLong(s.latest, want, g, now)
}

// openOrder returns how the gate is opened: not without what is outstanding, if what is written is
// too old by itself.
func (s *standbyOf) openOrder(want rules.Section, g *generation, now time.Time) GateOrder {
	if s.unkept && s.lag.tooLong(s.section, want, g, now) {
		return OpenCurrent
	}
	return OpenGate
}

// A standbyLag is since when a section is behind what ought to be in force.
type standbyLag struct {
	since   time.Time // zero: it is not
	checked bool
	edition int // in which that was checked
}

// tooLong reports whether a section is behind for longer than standbyMost. It compares once in each
// edition.
func (l *standbyLag) tooLong(has, want rules.Section, g *generation, now time.Time) bool {
	if !l.checked || l.edition != g.edition {
		l.checked, l.edition = true, g.edition
		switch {
		case want.Equal(has):
			l.since = time.Time{}
		case l.since.IsZero():
			l.since = g.captured
		}
	}
	return !l.since.IsZero() && now.Sub(l.since) >= standbyMost
}
