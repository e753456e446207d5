package daemon

import "time"

const (
	// walkShare is the part of a core that walks of all families together may
	// take beside a writer that never rests, as one in so many.
	walkShare = 50
	// walkBurst is what a family may spend at once after a quiet time: seven
	// walks of 20,000 rules (13 ms each, measured on Linux 6.18), more than a
	// flush in several commands asks for.
	walkBurst = 100 * time.Millisecond
)

// walks is the budget of time for walking through one family's tables: what a
// probe costs where no stamp is exact. After a quiet time a walk starts at
// once; a writer that syncs a hundred times a second is followed at the pace of
// the family's share. It is a token bucket in units of time, which may be
// overdrawn by one walk.
type walks struct {
	owed time.Duration // what was spent and is not yet earned back
	at   time.Time     // when owed was right
}

// readyAt returns when the next walk may start, which is in the past if it may
// start now. families is among how many families the share is divided.
func (w *walks) readyAt(families int) time.Time {
	return w.at.Add((w.owed - walkBurst) * time.Duration(walkShare*families))
}

// spend notes a walk that ended now and took so long. No walk counts for more
// than the burst: one that was suspended has cost nobody anything meanwhile.
func (w *walks) spend(now time.Time, took time.Duration, families int) {
	earned := now.Sub(w.at) / time.Duration(walkShare*families)
	if w.at.IsZero() || earned > w.owed {
		earned = w.owed
	}
	w.owed += min(took, walkBurst) - max(earned, 0)
	w.at = now
}
