package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
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

// finish ends a run. It looks once more, so that the next run knows for how long at most
// what it finds lost was absent, and saves what is known.
func (d *Daemon) finish(ctx context.Context, st *state) {
	if !st.removed && st.loss == nil {
		looking, done := context.WithTimeout(ctx, lastLookWithin)
		st.looking.hint(time.Now())
		d.look(looking, st)
		done()
	}
	d.leaveNative(ctx, st)
	d.save(ctx, st, true)
	log := klog.FromContext(ctx)
	severity.Notices(log).Info("Stopped; canaries and rules stay in place")
	if st.pause.on() {
		severity.Notices(log).Info("The pause continues after a restart", "until", st.pause.until.UTC().Format(time.RFC3339))
	}
}

// confirm takes down until when everything was known to be in force. That is when the
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

// boundAbsence takes down that the open loss may have begun long before it was seen, if
// this run did not know before what the family's tables hold.
func (st *state) boundAbsence(f rules.Family) {
	if r := &st.loss.record; st.families[f].known.at.IsZero() && r.LastInForce.IsZero() {
		r.LastInForce = st.absence.lastRun
	}
}

// A stall is a time in which canaryd was not executed.
type stall struct{ begin, end time.Time }

// stalledAfter returns how long nothing may have been looked at until canaryd counts as having
// stood still: it was stopped, or starved of the processor. Messages and hints of that time have
// no time.
func (d *Daemon) stalledAfter() time.Duration { return d.cfg.PollInterval + d.cfg.PollInterval/2 }

// boundStall takes down that the open loss may have come at any time since the look before, if
// that is longer ago than a look can be while the loop turns.
func (d *Daemon) boundStall(st *state, f rules.Family) {
	fs, r := st.families[f], &st.loss.record
	last := pace.Latest(pace.Latest(st.looking.before, fs.known.at), fs.written)
	if r.LastInForce.IsZero() && !last.IsZero() && r.Time.Sub(last) > d.stalledAfter() {
		r.LastInForce, r.Stalled = last, true
	}
}
