package daemon

import (
	"context"
	"time"
)

const (
	// Memory is given back when nothing was read or written for freeMemoryQuiet, by
	// when the disk has what was learned. To collect 10 MiB takes 10 ms, so it
	// is done every freeMemoryPause at most.
	freeMemoryQuiet = 1500 * time.Millisecond
	freeMemoryPause = 30 * time.Second
)

// memoryUse is when memory is given back to the kernel.
type memoryUse struct {
	freeAt time.Time // zero: there is none to give
	freed  time.Time
}

// scheduleFree notes that something is read or written at that time which leaves memory
// behind.
func (m *memoryUse) scheduleFree(at time.Time) {
	m.freeAt = latest(m.freeAt, latest(at.Add(freeMemoryQuiet), m.freed.Add(freeMemoryPause)))
}

// freeMemory gives memory back to the kernel.
func (d *Daemon) freeMemory(_ context.Context, st *state) {
	st.memory.freeAt, st.memory.freed = time.Time{}, time.Now()
	if d.cfg.FreeMemory != nil {
		d.cfg.FreeMemory()
	}
}
