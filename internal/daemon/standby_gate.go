package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
)

// This file opens and shuts the standby's gate. It is open only while nat is known to be lost and
// canaryd may put it back: never in observe mode, in a pause, while a table is unknown, or for
// jumps whose grace lasts, none of which is a loss.

// standbyChores are the rows of the loop's table that come before the look: what is to be shut is
// shut first, and what is to be opened before anything is read or written.
func (d *Daemon) standbyChores() []chore {
	return []chore{
		{"shut the standby", d.shutAt, nil, briefLimit, d.shutStandby},
		{"open the standby", d.openAt, nil, briefLimit, d.openStandby},
		{"shut the standby of native tables", d.shutNativeAt, nil, briefLimit, d.shutNativeStandby},
		{"open the standby of native tables", d.openNativeAt, nil, briefLimit, d.openNative},
	}
}

// wantsOpen reports whether the family's nat is lost and may be put back.
func (st *state) wantsOpen(f rules.Family) bool {
	return st.loss != nil && st.heals() && st.families[f].tables[rules.Nat].verdict.Loss()
}

// openAt returns when a gate is opened: at once, but only once for each loss.
func (d *Daemon) openAt(st *state) time.Time {
	if st.loss == nil || !d.hasStandby() {
		return time.Time{}
	}
	for f, fs := range st.families {
		if s := &fs.standby; !s.gate.isOpen() && s.mayOpen(st.loss.record.ID) && st.wantsOpen(f) {
			return d.made
		}
	}
	return time.Time{}
}

// mayOpen reports whether there is a copy, which was not tried or was not open for too long for
// that flush.
func (s *standbyOf) mayOpen(flush string) bool {
	return s.has() && s.gate.mayOpen(flush)
}

// openStandby opens the gates of the families whose nat is lost.
func (d *Daemon) openStandby(ctx context.Context, st *state) {
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && !fs.standby.gate.isOpen() && fs.standby.mayOpen(st.loss.record.ID) && st.wantsOpen(f) {
			d.openFamily(ctx, st, f)
		}
	}
}

// openFamily opens the family's gate, or opens it further, and returns how many commits that took.
// Whatever becomes of it, the replay goes on.
func (d *Daemon) openFamily(ctx context.Context, st *state, f rules.Family) (commits int) {
	s, l := &st.families[f].standby, st.loss
	if s.gate.spent(l.record.ID) || !s.has() {
		return 0
	}
	s.gate.try(l.record.ID)
	open, commits, err := d.cfg.Standby.Table.Gate(f, true)
	now := time.Now()
	if err != nil {
		if s.gate.ajar.met(err, now) {
			st.flushLog(ctx).Error(err, "The standby could not be opened; the replay does not wait for it", "flush", l.record.ID, "family", f)
		}
		return commits
	}
	s.gate.ajar.over()
	if !open || s.gate.isOpen() {
		return commits
	}
	s.gate.open(now)
	s.state = api.StandbyOpen
	l.record.Standby = l.record.Standby.With(f, now.Sub(l.record.Time))
	st.flushLog(ctx).Info("The standby translates until the rules are back", "flush", l.record.ID, "family", f,
		"after", now.Sub(l.record.Time).Round(10*time.Microsecond))
	return commits
}

// openMeanwhile opens gates for what a probe shows while canaryd waits for the flusher: it may
// come to nat last. It returns how many commits that took.
func (d *Daemon) openMeanwhile(ctx context.Context, st *state, f rules.Family, verdicts map[rules.TableName]canary.Verdict) int {
	v := verdicts[rules.Nat]
	if !d.hasStandby() || !v.Loss() || !st.heals() || !st.families[f].standby.has() {
		return 0
	}
	d.take(st, tableFinding{id: f.Table(rules.Nat), source: lossesOnly, finding: canary.Finding{Verdict: v}})
	return d.openFamily(ctx, st, f)
}

// passOwn returns the stamps after so many commits of canaryd's own; stamps themselves if another
// process committed meanwhile.
func (d *Daemon) passOwn(ctx context.Context, st *state, stamps map[rules.Family]iptables.Stamp, commits int) map[rules.Family]iptables.Stamp {
	if commits == 0 {
		return stamps
	}
	now := d.stamps(ctx, st)
	for f, stamp := range stamps {
		for range commits {
			stamp.Value = uint64(nft.Following(uint32(stamp.Value)))
		}
		if now[f] != stamp {
			return stamps
		}
	}
	return now
}

// shutAt returns when a gate is shut: as soon as it is not to be open any more.
func (d *Daemon) shutAt(st *state) time.Time {
	var first time.Time
	for f, fs := range st.families {
		first = earliest(first, fs.standby.gate.dueShut(st.wantsOpen(f), d.made))
	}
	return first
}

// shutStandby shuts the gates that are not to be open any more.
func (d *Daemon) shutStandby(ctx context.Context, st *state) {
	now := time.Now()
	for _, f := range rules.Families() {
		fs := st.families[f]
		if fs == nil || !fs.standby.gate.isOpen() || now.Before(fs.standby.gate.shutAt) {
			continue
		}
		switch {
		case !st.wantsOpen(f):
			d.shutFamily(ctx, st, f)
		case !now.Before(fs.standby.gate.until):
			d.shutFamily(ctx, st, f)
			st.flushLog(ctx).Info("The standby translates no more, although rules are still missing: what it has may be out of date", "flush", st.loss.record.ID,
				"family", f, "limit", standbyMost)
		}
	}
}

// shutFamily shuts the family's gate.
func (d *Daemon) shutFamily(ctx context.Context, st *state, f rules.Family) {
	s := &st.families[f].standby
	isOpen, _, err := d.cfg.Standby.Table.Gate(f, false)
	if isOpen {
		if s.gate.sticks(err) {
			klog.FromContext(ctx).Error(err, "The standby could not be shut; it is tried again", "family", f, "table", standby.TableName)
		}
		return
	}
	open := s.gate.shut()
	s.state = api.StandbyArmed
	if err != nil { // the table had to go
		d.standbyFailed(ctx, f, s, err)
	}
	d.cfg.Metrics.ObserveStandby(f, open)
	if st.loss != nil {
		st.loss.record.Standby = st.loss.record.Standby.Ended(open)
	}
	klog.FromContext(ctx).V(1).Info("The standby is shut", "family", f, "open", open.Round(10*time.Microsecond))
}
