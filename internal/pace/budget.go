package pace

import (
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// WalkShare is the share of a core, as one in so many, for walks of all families together
	// while a writer never rests. UrgentShare is the share for stamps and urgent probes, which
	// continue when walks must wait. Together they are 2 %.
	WalkShare   = 60
	UrgentShare = 300
	// WalkBurst is how much a family may spend at once after a quiet time. It covers seven
	// walks of 20,000 rules (13 ms each, measured on Linux 6.18), more than a flush in several
	// commands needs.
	WalkBurst = 100 * time.Millisecond
	// A look because of a hint costs StormCharge, which is earned back in 5 ms, and 200 of them
	// are free. During 500 commits a second, a look at each took 15 % of a core.
	StormCharge = 500 * time.Microsecond
	StormShare  = 10
)

// A Budget bounds the time for looks at one family while no stamp is exact. After a quiet time
// a look starts at once. A writer that syncs a hundred times a second is followed at the pace
// of the family's share.
type Budget struct {
	Walks  Bucket
	Urgent Bucket // of stamps and urgent probes
}

// NewBudget returns the budget of one of so many families.
func NewBudget(families int) Budget {
	return Budget{Walks: Bucket{Share: WalkShare * families}, Urgent: Bucket{Share: UrgentShare * families}}
}

// StampAt returns when a hint may make the loop read a stamp again, given the last one. It is
// zero, at once, if the last one was exact.
func (b *Budget) StampAt(last iptables.Stamp) time.Time {
	if last.Exact {
		return time.Time{}
	}
	return b.Urgent.ReadyAt()
}

// ProbeAt returns when a family with that stamp may be probed; zero, at once, if the stamp is
// exact.
func (b *Budget) ProbeAt(stamp iptables.Stamp) time.Time {
	if stamp.Exact {
		return time.Time{}
	}
	return b.Walks.ReadyAt()
}

// A Bucket is a token bucket in units of time. One look may overdraw it. It fills with one part
// in Share of the passing time.
type Bucket struct {
	Share int
	owed  time.Duration // spent and not yet earned back
	at    time.Time     // the time at which owed was right
}

// ReadyAt returns when the next look may start. A time in the past means now.
func (b *Bucket) ReadyAt() time.Time {
	return b.at.Add((b.owed - WalkBurst) * time.Duration(b.Share))
}

// Spend notes a look that ended now and took so long; ReadyAt then says when the next one fits
// the share. No look counts for more than the burst, because a suspended look has cost nothing.
func (b *Bucket) Spend(now time.Time, took time.Duration) {
	earned := now.Sub(b.at) / time.Duration(b.Share)
	if b.at.IsZero() || earned > b.owed {
		earned = b.owed
	}
	b.owed += min(took, WalkBurst) - max(earned, 0)
	b.at = now
}

const (
	// Free memory returns to the kernel when nothing was read or written for freeMemoryQuiet,
	// because the disk has the generation by then. Collecting 10 MiB takes 10 ms, so it is done
	// at most every freeMemoryPause.
	freeMemoryQuiet = 1500 * time.Millisecond
	freeMemoryPause = 30 * time.Second
)

// Memory plans when free memory returns to the kernel.
type Memory struct {
	FreeAt time.Time // zero: there is none to give
	freed  time.Time
}

// ScheduleFree notes a read or write at that time, which leaves memory behind.
func (m *Memory) ScheduleFree(at time.Time) {
	m.FreeAt = Latest(m.FreeAt, Latest(at.Add(freeMemoryQuiet), m.freed.Add(freeMemoryPause)))
}

// Gave notes that memory was returned at that time.
func (m *Memory) Gave(at time.Time) { m.FreeAt, m.freed = time.Time{}, at }
