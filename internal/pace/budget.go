package pace

import (
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// WalkShare is the part of a core, as one in so many, that walks of all families together
	// may take while a writer never rests. urgentShare is that of stamps and urgent probes, which
	// go on when walks must wait. Together they are 2 %.
	WalkShare   = 60
	UrgentShare = 300
	// WalkBurst is what a family may spend at once after a quiet time: seven
	// walks of 20,000 rules (13 ms each, measured on Linux 6.18), more than a
	// flush in several commands asks for.
	WalkBurst = 100 * time.Millisecond
	// A look that a hint asked for counts as stormCharge, which is earned back in 5 ms, and 200 of
	// them are free. Next to 500 commits a second a look at each took 15 % of a core.
	StormCharge = 500 * time.Microsecond
	StormShare  = 10
)

// A Budget is of the time that looking at one family may take where no stamp is exact. After
// a quiet time a look starts at once; a writer that syncs a hundred times a second is followed
// at the pace of the family's share.
type Budget struct {
	Walks  Bucket
	Urgent Bucket // of stamps and urgent probes
}

// NewBudget returns the budget of one of so many families.
func NewBudget(families int) Budget {
	return Budget{Walks: Bucket{Share: WalkShare * families}, Urgent: Bucket{Share: UrgentShare * families}}
}

// StampAt returns when a hint may make the loop ask for a stamp again, given the last one.
func (b *Budget) StampAt(last iptables.Stamp) time.Time {
	if last.Exact {
		return time.Time{}
	}
	return b.Urgent.ReadyAt()
}

// ProbeAt returns when a family of that stamp may be probed.
func (b *Budget) ProbeAt(stamp iptables.Stamp) time.Time {
	if stamp.Exact {
		return time.Time{}
	}
	return b.Walks.ReadyAt()
}

// A Bucket is a token bucket in units of time, which may be overdrawn by one look. It fills
// with one part in share of the time that passes.
type Bucket struct {
	Share int
	owed  time.Duration // what was spent and is not yet earned back
	at    time.Time     // when owed was right
}

// ReadyAt returns when the next look may start, which is in the past if it may
// start now.
func (b *Bucket) ReadyAt() time.Time {
	return b.at.Add((b.owed - WalkBurst) * time.Duration(b.Share))
}

// Spend notes a look that ended now and took so long. None counts for more
// than the burst: one that was suspended has cost nothing meanwhile.
func (b *Bucket) Spend(now time.Time, took time.Duration) {
	earned := now.Sub(b.at) / time.Duration(b.Share)
	if b.at.IsZero() || earned > b.owed {
		earned = b.owed
	}
	b.owed += min(took, WalkBurst) - max(earned, 0)
	b.at = now
}

const (
	// Memory is given back when nothing was read or written for freeMemoryQuiet, by
	// when the disk has what was learned. To collect 10 MiB takes 10 ms, so it
	// is done every freeMemoryPause at most.
	freeMemoryQuiet = 1500 * time.Millisecond
	freeMemoryPause = 30 * time.Second
)

// Memory is when memory is given back to the kernel.
type Memory struct {
	FreeAt time.Time // zero: there is none to give
	freed  time.Time
}

// ScheduleFree notes that something is read or written at that time which leaves memory
// behind.
func (m *Memory) ScheduleFree(at time.Time) {
	m.FreeAt = Latest(m.FreeAt, Latest(at.Add(freeMemoryQuiet), m.freed.Add(freeMemoryPause)))
}

// Gave notes that memory is given back at that time.
func (m *Memory) Gave(at time.Time) { m.FreeAt, m.freed = time.Time{}, at }
