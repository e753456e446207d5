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
	d.copier.todo <- c.write.Run
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
		<-d.copier.done
		d.endCopying(ctx, st)
	}
}
