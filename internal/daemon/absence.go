package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lastLookWithin bounds the look with which a run ends: a service manager waits.
const lastLookWithin = 2 * time.Second

// absence is when everything was in force, which bounds how long what is found lost was absent.
type absence struct {
	confirmed time.Time     // when everything was last in force, as the disk has it
	uptime    time.Duration // of the machine, then
	// lastRun is when the last run knew the generation to be in force, by the
	// clock of this run; zero: there was none, or its time is not known.
	lastRun time.Time
}

// leave ends a run: it looks once more, so that the next run knows how long what it
// finds lost can have been absent at most, and keeps what is known.
func (d *Daemon) leave(ctx context.Context, st *state) {
	if !st.removed && st.loss == nil {
		looking, done := context.WithTimeout(ctx, lastLookWithin)
		st.looking.hint(time.Now())
		d.look(looking, st)
		done()
	}
	d.leaveNative(ctx, st)
	d.save(ctx, st, true)
}

// confirm notes until when everything was known to be in force: that is when the
// tables were last known, not when the disk is written.
func (d *Daemon) confirm(st *state) {
	if at := lastKnown(st); !at.IsZero() {
		st.absence.confirmed, st.absence.uptime = at, d.cfg.Uptime()-time.Since(at)
	}
}

// inForceAt returns the time at which the machine was up for that long; zero if that
// is yet to come, and so comes from another clock.
func (d *Daemon) inForceAt(uptime time.Duration) time.Time {
	age := d.cfg.Uptime() - uptime
	if age < 0 {
		return time.Time{}
	}
	return time.Now().Add(-age)
}

// boundAbsence notes that the open loss may have begun long before it was seen, if
// this run never knew before what the family's tables hold.
func (st *state) boundAbsence(f rules.Family) {
	if r := &st.loss.record; st.families[f].known.at.IsZero() && r.LastInForce.IsZero() {
		r.LastInForce = st.absence.lastRun
	}
}

// back notes that everything was back at that time, and returns how long it was absent
// or, where no canaryd ran when it was lost, can have been at most.
func back(r *api.Flush, at time.Time) time.Duration {
	since := r.Time
	if r.AbsentAtMost = !r.LastInForce.IsZero(); r.AbsentAtMost {
		since = r.LastInForce
	}
	absent := at.Sub(since)
	r.AbsentSeconds = absent.Seconds()
	return absent
}
