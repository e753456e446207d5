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

// tooOld reports whether what would be opened is behind what ought to be in force for longer than
// standbyMost: an owner may have removed what it still has. It compares once in each edition.
func (s *standbyOf) tooOld(want rules.Section, g *generation, now time.Time) bool {
	if s.checked != g.edition {
		s.checked = g.edition
		switch {
		case want.Equal(s.latest):
			s.behindSince = time.Time{}
		case s.behindSince.IsZero():
			s.behindSince = g.captured
		}
	}
	return !s.behindSince.IsZero() && now.Sub(s.behindSince) >= standbyMost
}
