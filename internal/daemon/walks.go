package daemon

import "time"

const (
	// walkShare is the part of a core that walks of all families together may
	// take beside a writer that never rests, as one in so many; urgentShare that
	// of stamps and urgentProbes, which go on when walks must wait. Together they are
	// 2 %.
	walkShare   = 60
	urgentShare = 300
	// walkBurst is what a family may spend at once after a quiet time: seven
	// walks of 20,000 rules (13 ms each, measured on Linux 6.18), more than a
	// flush in several commands asks for.
	walkBurst = 100 * time.Millisecond
)

// budgets are what looking at one family may cost.
type budgets struct {
	walks  budget // what probes may cost where stamps are not exact,
	urgent budget // and what stamps and urgent probes may
}

// A budget is of time that looking at one family's tables takes where no stamp
// is exact. After a quiet time a look starts at once; a writer that syncs a
// hundred times a second is followed at the pace of the family's share, which
// every method is told as one in so many. It is a token bucket in units of
// time, which may be overdrawn by one look.
type budget struct {
	owed time.Duration // what was spent and is not yet earned back
	at   time.Time     // when owed was right
}

// readyAt returns when the next look may start, which is in the past if it may
// start now.
func (b *budget) readyAt(share int) time.Time {
	return b.at.Add((b.owed - walkBurst) * time.Duration(share))
}

// spend notes a look that ended now and took so long. None counts for more
// than the burst: one that was suspended has cost nobody anything meanwhile.
func (b *budget) spend(now time.Time, took time.Duration, share int) {
	earned := now.Sub(b.at) / time.Duration(share)
	if b.at.IsZero() || earned > b.owed {
		earned = b.owed
	}
	b.owed += min(took, walkBurst) - max(earned, 0)
	b.at = now
}
