package copies

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Lag is the time since which a section has been behind the generation.
type Lag struct {
	Since   time.Time // zero: it is not
	checked bool
	edition int // the edition in which that was checked
}

// CurrentIn returns the lag of a section that is up to date in an edition.
func CurrentIn(edition int) Lag { return Lag{checked: true, edition: edition} }

// TooLong reports whether a section of the copy (has) has been behind the generation's (want)
// for longer than Most. The standby then must not open with it. TooLong compares once in each
// edition. captured is when the edition was learned.
func (l *Lag) TooLong(has, want rules.Section, edition int, captured, now time.Time) bool {
	if !l.checked || l.edition != edition {
		l.checked, l.edition = true, edition
		switch {
		case want.Equal(has):
			l.Since = time.Time{}
		case l.Since.IsZero():
			l.Since = captured
		}
	}
	return !l.Since.IsZero() && now.Sub(l.Since) >= Most
}

// SameChain reports whether two chains have the same name and rules.
func SameChain(a, b rules.Chain) bool { return a.Name == b.Name && slices.Equal(a.Rules, b.Rules) }

// OtherChains counts the chains that only one of two sections has, or that differ. Status and
// metrics show it as the copy's outstanding chains.
func OtherChains(a, b rules.Section) (n int) {
	for _, c := range rules.ChangedChains(a.Chains, b.Chains) {
		if c.Was < 0 || c.Is < 0 || !SameChain(a.Chains[c.Was], b.Chains[c.Is]) {
			n++
		}
	}
	return n
}
