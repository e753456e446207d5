package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/copies"
)

// This file writes copies while the loop runs. At 5,000 services the kernel takes 40 ms for a
// change of a copy, and may wait for an owner's transaction first. Meanwhile the loop looks,
// examines, learns and opens gates. Chores that write, and heals, wait (runnable).

// copying is the write of copies that is under way.
type copying struct {
	write copies.Write
	wants []copies.Want
	start time.Time // of following them
}

// beginWriting starts the write of copies. It never waits: followStandby runs only after the
// write before was taken up.
func (d *Daemon) beginWriting(st *state, c *copying) {
	st.copying = c
	d.writes <- c.write
}

// runWrites writes copies until writes is closed. It has a goroutine of its own, so that the loop
// does not wait for the kernel.
func (d *Daemon) runWrites() {
	for write := range d.writes {
		used := d.cpu()
		d.writing.Store(&running{"write the standby's copy", time.Now(), writeLimit})
		write.Run()
		d.writing.Store(nil)
		d.elsewhere.Add(int64(d.cpu() - used))
		d.written <- struct{}{}
	}
}

// endCopying takes up copies that were written.
func (d *Daemon) endCopying(ctx context.Context, st *state) {
	c := st.copying
	st.copying = nil
	d.takeCopies(ctx, st, c.wants, c.write.Take(), c.start)
}

// awaitCopying waits until no copy is being written. Requests and the end of the run call it.
func (d *Daemon) awaitCopying(ctx context.Context, st *state) {
	if st.copying != nil {
		<-d.written
		d.endCopying(ctx, st)
	}
}
