package daemon

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lastLookWithin bounds the look with which a run ends: a service manager waits.
const lastLookWithin = 2 * time.Second

// absence is when everything was last in force. It bounds how long lost rules were absent.
type absence struct {
	confirmed time.Time     // when everything was last in force, as the disk has it
	uptime    time.Duration // of the machine, then
	// lastRun is when the last run knew the generation to be in force, by the clock of this
	// run. Zero: there was none, or its time is not known.
	lastRun time.Time
}

// finish ends a run. It looks once more and saves its knowledge, so that the next run can bound
// how long lost rules were absent.
func (d *Daemon) finish(ctx context.Context, st *state) {
	d.awaitCopying(ctx, st)
	d.awaitSaving(ctx, st)
	if !st.removed && st.loss == nil {
		looking, done := context.WithTimeout(ctx, lastLookWithin)
		st.looking.hint(time.Now())
		d.look(looking, st)
		done()
	}
	d.leaveNative(ctx, st)
	d.save(ctx, st, true)
	d.awaitSaving(ctx, st)
	log := klog.FromContext(ctx)
	severity.Notices(log).Info("Stopped; canaries and rules stay in place")
	if st.pause.on() {
		severity.Notices(log).Info("The pause continues after a restart", "until", st.pause.until.UTC().Format(time.RFC3339))
	}
}

// confirm notes until when everything was known to be in force, for the disk. That is when the
// tables were last known, not when the disk is written.
func (d *Daemon) confirm(st *state) {
	if at := lastKnown(st); !at.IsZero() {
		st.absence.confirmed, st.absence.uptime = at, d.cfg.Uptime()-time.Since(at)
	}
}

// inForceAt returns the time at which the machine had been up for that long, for the uptime
// that the last run stored. It returns zero if that time is in the future, because then the
// uptime is from another clock.
func (d *Daemon) inForceAt(uptime time.Duration) time.Time {
	age := d.cfg.Uptime() - uptime
	if age < 0 {
		return time.Time{}
	}
	return time.Now().Add(-age)
}

// boundAbsence notes that the open loss may have begun long before it was seen (LastInForce).
// That is so if this run never knew the content of the family's tables. openLoss calls it.
func (st *state) boundAbsence(f rules.Family) {
	if r := &st.loss.record; st.families[f].known.at.IsZero() && r.LastInForce.IsZero() {
		r.LastInForce = st.absence.lastRun
	}
}

// A stall is a time in which canaryd was not executed.
type stall struct{ begin, end time.Time }

// stalls are the last stalls, the oldest first. On a starved node one follows another while a loss
// waits for its record.
type stalls []stall

// stallsKept bounds them: a record is made within some looks of its loss.
const stallsKept = 8

func (l *stalls) add(s stall) {
	*l = append(*l, s)
	*l = (*l)[max(len(*l)-stallsKept, 0):]
}

// at returns the stall in which a message was read, or that ended right then. A record then
// says that the loss may have begun with the stall.
func (l stalls) at(t time.Time) (s stall, found bool) {
	i := slices.IndexFunc(l, func(s stall) bool { return t.After(s.begin) && !t.After(s.end) })
	if i < 0 {
		return stall{}, false
	}
	return l[i], true
}

// stalledAfter returns the time without a look after which canaryd counts as stalled: it was
// stopped, or starved of the processor. Messages and hints of a stall do not show their time.
func (d *Daemon) stalledAfter() time.Duration { return d.cfg.PollInterval + d.cfg.PollInterval/2 }

// boundStall notes that a loss that was opened just now may have begun at any time since the
// look before, if canaryd stalled since then. looked is how long the look took that shows the
// loss: a stall may be in the middle of it, behind the record's time.
func (d *Daemon) boundStall(st *state, f rules.Family, looked time.Duration) {
	fs, r := st.families[f], &st.loss.record
	last := pace.Latest(pace.Latest(st.looking.before, fs.known.at), fs.written)
	if r.LastInForce.IsZero() && !last.IsZero() && max(r.Time.Sub(last), looked) > d.stalledAfter() {
		r.LastInForce, r.Stalled = last, true
	}
}
