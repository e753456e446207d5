package daemon

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
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
		{"open the standby of native tables", d.openNativeAt, nil, briefLimit, func(ctx context.Context, st *state) { d.openNative(ctx, st) }},
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

// mayOpenAny reports whether there is a copy that a flush may open.
func (st *state) mayOpenAny() bool {
	if st.heals() {
		for _, fs := range st.families {
			if fs.standby.has() {
				return true
			}
		}
	}
	return false
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
	want := st.want()[f.Table(rules.Nat)]
	if s.tooOld(want, &st.generation, time.Now()) {
		if s.gate.bars("") {
			severity.Warnings(st.flushLog(ctx)).Info("The standby stays shut: its copy is out of date", "flush", l.record.ID, "family", f, "behindSince", s.latestLag.since)
		}
		return 0
	}
	got, err := d.cfg.Standby.Table.Gate(StandbyWant{ID: f.Table(rules.Nat)}, s.openOrder(want, &st.generation, time.Now()))
	now := time.Now()
	if errors.Is(err, ErrStandbyOutdated) {
		if s.gate.bars("") {
			severity.Warnings(st.flushLog(ctx)).Info("The standby stays shut: its copy is out of date", "flush", l.record.ID, "family", f,
				"behindSince", s.lag.since, "reason", err)
		}
		return got.Commits
	}
	if err != nil {
		if s.gate.ajar.met(err, now) {
			severity.Warnings(st.flushLog(ctx)).Error(err, "The standby could not be opened; the replay does not wait for it", "flush", l.record.ID, "family", f)
		}
		if errors.Is(err, standby.ErrNotBuilt) { // its table went with another one's, or by its limit
			if s.gate.isOpen() {
				d.gateShut(st, f, s, now)
			}
			d.standbyFailed(ctx, f, s, err)
		}
		return got.Commits
	}
	s.gate.ajar.over()
	for _, hook := range slices.Sorted(maps.Keys(got.Barred)) {
		if s.gate.bars(hook) {
			severity.Warnings(st.flushLog(ctx)).Info("The standby stays shut for a hook", "flush", l.record.ID, "family", f, "hook", hook, "reason", got.Barred[hook])
		}
	}
	if !got.Open && s.gate.isOpen() {
		open := d.gateShut(st, f, s, now)
		s.gate.waits, s.state = true, api.StandbyArmed
		severity.Warnings(st.flushLog(ctx)).Info("The standby translates no more: another owner wrote to nat what keeps a hook shut", "flush", l.record.ID,
			"family", f, "open", open.Round(10*time.Microsecond))
	}
	if !got.Open || s.gate.isOpen() {
		return got.Commits
	}
	s.gate.open(now)
	s.state = api.StandbyOpen
	l.record.Standby = l.record.Standby.With(f, now.Sub(l.record.Time))
	severity.Notices(st.flushLog(ctx)).Info("The standby translates until the rules are back"+got.less(),
		got.fields("flush", l.record.ID, "family", f, "after", now.Sub(l.record.Time).Round(10*time.Microsecond))...)
	d.sweepNat(st.want(), f, st.families[f].known.natIntact)
	return got.Commits
}

// less is what the log says behind that the standby translates: nothing, unless its copy is out of
// date.
func (g StandbyGate) less() string {
	if g.Outdated == nil {
		return ""
	}
	return ", but its copy is out of date"
}

// fields returns fields of a log line, with the reason of what less says.
func (g StandbyGate) fields(fields ...any) []any {
	if g.Outdated == nil {
		return fields
	}
	return append(fields, "reason", g.Outdated)
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
		if fs == nil || !fs.standby.gate.isOpen() {
			continue
		}
		switch {
		case !st.wantsOpen(f):
			d.shutFamily(ctx, st, f)
		case !now.Before(fs.standby.gate.until):
			d.shutFamily(ctx, st, f)
			severity.Warnings(st.flushLog(ctx)).Info("The standby translates no more, although rules are still missing: what it has may be out of date", "flush", st.loss.record.ID,
				"family", f, "limit", standbyMost)
		}
	}
}

// shutFamily shuts the family's gate. Whatever the kernel answers, no hook is open then.
func (d *Daemon) shutFamily(ctx context.Context, st *state, f rules.Family) {
	s := &st.families[f].standby
	got, err := d.cfg.Standby.Table.Gate(StandbyWant{ID: f.Table(rules.Nat)}, ShutGate)
	open := d.gateShut(st, f, s, cmp.Or(got.Shut, time.Now()))
	s.state = api.StandbyArmed
	if err != nil { // the table had to go
		d.standbyFailed(ctx, f, s, err)
	}
	s.tooOld(st.want()[f.Table(rules.Nat)], &st.generation, time.Now()) // what was learned meanwhile
	if !got.Shut.IsZero() {
		severity.Warnings(klog.FromContext(ctx)).Info("The standby's limit shut it before canaryd did", "family", f, "open", open.Round(10*time.Microsecond))
		return
	}
	klog.FromContext(ctx).V(1).Info("The standby is shut", "family", f, "open", open.Round(10*time.Microsecond))
}

// gateShut takes up that the family's gate is shut since at, and returns for how long it was open.
func (d *Daemon) gateShut(st *state, f rules.Family, s *standbyOf, at time.Time) (open time.Duration) {
	open = s.gate.shut(at)
	d.cfg.Metrics.ObserveStandby(f, open)
	if st.loss != nil {
		st.loss.record.Standby = st.loss.record.Standby.Ended(s.gate.total)
	}
	return open
}
