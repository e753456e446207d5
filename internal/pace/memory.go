package pace

import "time"

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
