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
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
)

// This file opens and shuts gates. A gate is open only while its table is known to be lost and
// canaryd may put it back. Observe mode, a pause, an unknown table, jumps in their grace, and
// possible changes of an owner are no such loss.

// standbyChores are the chores before the look. Gates that must not be open are shut first, and
// lost tables' gates are opened before anything is read or written.
func (d *Daemon) standbyChores() []chore {
	return []chore{
		{"shut the standby", d.shutAt, nil, briefLimit, d.shutStandby},
		{"open the standby", d.openAt, nil, briefLimit, func(ctx context.Context, st *state) { d.openStandby(ctx, st) }},
	}
}

// openAt returns when a gate is opened: at once (d.made), but only once for each loss; zero:
// none is.
func (d *Daemon) openAt(st *state) time.Time {
	if anyOf(st.standby, func(s *standbyOf) bool { return s.mayOpen(st) }) {
		return d.made
	}
	return time.Time{}
}

// mayOpen reports whether the gate is shut and is to be opened. For that there must be a copy.
// The gate must not have been tried for that flush, or not have been open for too long.
func (s *standbyOf) mayOpen(st *state) bool {
	record := s.kind.record(st)
	return record != nil && s.has() && !s.gate.IsOpen() && s.gate.MayOpen(record.ID) && s.kind.wantsOpen(st)
}

// openStandby opens the gates of lost tables, and returns how many commits of canaryd's own that
// took.
func (d *Daemon) openStandby(ctx context.Context, st *state) (commits int) {
	for _, s := range st.copies() {
		if s.mayOpen(st) {
			commits += d.openGate(ctx, st, s)
		}
	}
	return commits
}

// openGate opens a gate, or opens it further, and returns how many commits that took. If it
// cannot, the log says why. The replay continues in any case.
func (d *Daemon) openGate(ctx context.Context, st *state, s *standbyOf) (commits int) {
	record := s.kind.record(st)
	if s.gate.Spent(record.ID) || !s.has() {
		return 0
	}
	s.gate.Try(record.ID)
	order, since, ok := s.kind.openOrder(st, time.Now())
	if !ok {
		d.staysShut(ctx, st, s, "behindSince", since)
		return 0
	}
	got, err := d.cfg.Standby.Table.Gate(s.kind.toOpen(st), order)
	now := time.Now()
	switch {
	case errors.Is(err, copies.ErrOutdated):
		d.staysShut(ctx, st, s, "behindSince", since, "reason", err)
		return got.Commits
	case err != nil:
		d.openFailed(ctx, st, s, err)
		return got.Commits
	}
	s.gate.Trouble.Over()
	log := s.kind.log(ctx, d, st)
	for _, hook := range slices.Sorted(maps.Keys(got.KeptShut)) {
		if s.gate.KeepsShut(hook) {
			severity.Warnings(log).Info("The standby stays shut for a hook", s.fields("hook", hook, "reason", got.KeptShut[hook])...)
		}
	}
	if !got.Open && s.gate.IsOpen() {
		open := d.gateShut(st, s, now)
		s.gate.Waits, s.state = true, api.StandbyArmed
		severity.Warnings(log).Info("The standby stopped translating: another owner's new rule in nat keeps a hook shut", s.fields("open", open.Round(10*time.Microsecond))...)
	}
	if !got.Open || s.gate.IsOpen() {
		return got.Commits
	}
	s.gate.Open(now)
	s.state = api.StandbyOpen
	after := now.Sub(record.Time)
	severity.Notices(log).Info("The standby translates until the rules are back"+got.Less(), got.Fields(s.fields("after", after.Round(10*time.Microsecond))...)...)
	s.kind.opened(d, st, got, after)
	return got.Commits
}

// staysShut says once in each flush that a gate stays shut, because its copy is out of date.
// fields are the reasons for the log.
func (d *Daemon) staysShut(ctx context.Context, st *state, s *standbyOf, fields ...any) {
	if s.gate.KeepsShut("") {
		severity.Warnings(s.kind.log(ctx, d, st)).Info("The standby stays shut: its copy is out of date", s.fields(fields...)...)
	}
}

// fields returns the fields of a log line about the gate in a flush.
func (s *standbyOf) fields(more ...any) []any {
	return append([]any{"flush", s.gate.Flush, "table", s.kind.name()}, more...)
}

// openFailed handles the error of openGate for the gate of a lost table. It logs the error
// unless it lasts; the replay continues without the standby. After ErrNotBuilt the kernel has
// no copy any more: the gate counts as shut, and the copy will be built again.
func (d *Daemon) openFailed(ctx context.Context, st *state, s *standbyOf, err error) {
	if s.gate.Trouble.Met(err, time.Now()) {
		severity.Warnings(s.kind.log(ctx, d, st)).Error(err, "The standby could not be opened; the replay does not wait for it", s.fields()...)
	}
	if !errors.Is(err, standby.ErrNotBuilt) {
		return
	}
	d.standbyFailed(ctx, st, s, err) // its table was deleted with another one's, or by its limit
}

// passOwn returns the stamps after so many commits of canaryd's own; stamps themselves if
// another process committed meanwhile. So a lull does not take an opened gate for the flusher's
// write.
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

// shutAt returns when a gate is shut: as soon as it is not to be open any more, or at its
// limit; zero: none is.
func (d *Daemon) shutAt(st *state) (first time.Time) {
	for _, s := range st.standby {
		first = pace.Earliest(first, s.gate.DueShut(s.kind.wantsOpen(st), d.made))
	}
	return first
}

// shutStandby shuts the gates that are not to be open any more, after a proof, or when a copy
// is too old.
func (d *Daemon) shutStandby(ctx context.Context, st *state) {
	now := time.Now()
	for _, s := range st.copies() {
		wanted := s.gate.IsOpen() && s.kind.wantsOpen(st)
		if !s.gate.IsOpen() || wanted && now.Before(s.gate.Until) {
			continue
		}
		if d.shutGate(ctx, st, s); wanted {
			severity.Warnings(s.kind.log(ctx, d, st)).Info("The standby stopped translating while rules are missing: its copy may be out of date",
				s.fields("limit", copies.Most)...)
		}
	}
}

// shutGate shuts one gate. Then no hook is open, also if the kernel returns an error.
func (d *Daemon) shutGate(ctx context.Context, st *state, s *standbyOf) {
	got, err := d.cfg.Standby.Table.Gate(copies.Want{ID: s.id}, copies.Shut)
	open := d.gateShut(st, s, cmp.Or(got.Shut, time.Now()))
	s.state = api.StandbyArmed
	if err != nil { // the table had to be deleted
		d.standbyFailed(ctx, st, s, err)
	}
	s.kind.openOrder(st, time.Now()) // notes since when the copy lacks the latest rules
	fields := []any{"table", s.kind.name(), "open", open.Round(10 * time.Microsecond)}
	if !got.Shut.IsZero() {
		severity.Warnings(klog.FromContext(ctx)).Info("The standby's limit shut it before canaryd did", fields...)
		return
	}
	klog.FromContext(ctx).V(1).Info("The standby is shut", fields...)
}

// gateShut notes in metrics and in the open record that a gate is shut since at, and returns
// for how long it was open.
func (d *Daemon) gateShut(st *state, s *standbyOf, at time.Time) (open time.Duration) {
	open = s.gate.Shut(at)
	if !s.native() {
		d.cfg.Metrics.ObserveStandby(s.id.Family, open)
	}
	if record := s.kind.record(st); record != nil {
		record.Standby = record.Standby.Ended(s.gate.Total)
	}
	return open
}
