package daemon

import (
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// walkShare is the part of a core, as one in so many, that walks of all families together
	// may take while a writer never rests. urgentShare is that of stamps and urgent probes, which
	// go on when walks must wait. Together they are 2 %.
	walkShare   = 60
	urgentShare = 300
	// walkBurst is what a family may spend at once after a quiet time: seven
	// walks of 20,000 rules (13 ms each, measured on Linux 6.18), more than a
	// flush in several commands asks for.
	walkBurst = 100 * time.Millisecond
	// A look that a hint asked for counts as stormCharge, which is earned back in 5 ms, and 200 of
	// them are free. Next to 500 commits a second a look at each took 15 % of a core.
	stormCharge = 500 * time.Microsecond
	stormShare  = 10
)

// A budget is of the time that looking at one family may take where no stamp is exact. After
// a quiet time a look starts at once; a writer that syncs a hundred times a second is followed
// at the pace of the family's share.
type budget struct {
	walks  bucket
	urgent bucket // of stamps and urgent probes
}

// newBudget returns the budget of one of so many families.
func newBudget(families int) budget {
	return budget{walks: bucket{share: walkShare * families}, urgent: bucket{share: urgentShare * families}}
}

// stampAt returns when a hint may make the loop ask for a stamp again, given the last one.
func (b *budget) stampAt(last iptables.Stamp) time.Time {
	if last.Exact {
		return time.Time{}
	}
	return b.urgent.readyAt()
}

// probeAt returns when a family of that stamp may be probed.
func (b *budget) probeAt(stamp iptables.Stamp) time.Time {
	if stamp.Exact {
		return time.Time{}
	}
	return b.walks.readyAt()
}

// A bucket is a token bucket in units of time, which may be overdrawn by one look. It fills
// with one part in share of the time that passes.
type bucket struct {
	share int
	owed  time.Duration // what was spent and is not yet earned back
	at    time.Time     // when owed was right
}

// readyAt returns when the next look may start, which is in the past if it may
// start now.
func (b *bucket) readyAt() time.Time {
	return b.at.Add((b.owed - walkBurst) * time.Duration(b.share))
}

// spend notes a look that ended now and took so long. None counts for more
// than the burst: one that was suspended has cost nothing meanwhile.
func (b *bucket) spend(now time.Time, took time.Duration) {
	earned := now.Sub(b.at) / time.Duration(b.share)
	if b.at.IsZero() || earned > b.owed {
		earned = b.owed
	}
	b.owed += min(took, walkBurst) - max(earned, 0)
	b.at = now
}
