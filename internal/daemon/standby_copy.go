package daemon

import (
	"context"
	"errors"
	"net"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// pieceRest is the time between two pieces of a build. The loop takes hints and requests only while
// no chore is due.
const pieceRest = time.Millisecond

// idleRest is the time until canaryd decides again whether a table without a copy needs one.
const idleRest = 100 * time.Millisecond

// followAt returns when followStandby is due: at once (d.made) for a new native table, zero if
// nothing is to be done.
func (d *Daemon) followAt(st *state) (first time.Time) {
	if len(d.newNatives(st)) > 0 {
		return d.made
	}
	for _, s := range st.standby {
		first = pace.Earliest(first, s.kind.followAt(d, st, s))
	}
	return first
}

// newNatives returns the guarded native tables for which followStandby has not decided yet
// whether they get a copy.
func (d *Daemon) newNatives(st *state) (ids []tableid.TableID) {
	for id, t := range st.native.tables {
		if d.hasNativeStandby() && st.standby[id] == nil && !t.drill {
			ids = append(ids, id)
		}
	}
	return ids
}

// followStandby makes, follows or deletes the copies that are due. It is a step of the loop,
// like keep.
func (d *Daemon) followStandby(ctx context.Context, st *state) {
	for _, id := range d.newNatives(st) {
		st.standby[id] = &standbyOf{id: id, kind: &nativeCopy{id: id}}
	}
	now := time.Now()
	var wants []copies.Want // all copies of nat, or one native copy
	for _, s := range st.copies() {
		if s.native() && len(wants) > 0 || !pace.Due(s.kind.followAt(d, st, s), now) {
			continue
		}
		want := s.kind.decide(st, !s.making.TryAt.IsZero())
		s.making.TryAt = time.Time{}
		switch why := d.idle(st, s); {
		case st.mode != api.Heal:
			d.releaseStandby(ctx, st, s, api.StandbyOff, why)
		case why != "":
			d.releaseStandby(ctx, st, s, api.StandbyIdle, why)
			s.next = now.Add(idleRest)
		default:
			wants = append(wants, want)
		}
	}
	if len(wants) > 0 {
		d.follow(ctx, st, wants)
	}
}

// idle returns why a table needs no copy, or gets none: followStandby then deletes it. It
// returns "" if it gets one.
func (d *Daemon) idle(st *state, s *standbyOf) string {
	if st.mode != api.Heal {
		return whyObserve
	}
	return s.kind.idle(d, st, s.has())
}

// follow brings copies to the content that ought to be in force: all copies of nat together, or
// one native copy. A goroutine of its own writes them (standby_write.go).
func (d *Daemon) follow(ctx context.Context, st *state, wants []copies.Want) {
	start := time.Now()
	all, write := d.cfg.Standby.Table.Follow(ctx, wants...)
	d.takeCopies(ctx, st, wants, all, start)
	if write != nil {
		d.beginWriting(st, &copying{write: write, wants: wants, start: start})
	}
}

// takeCopies takes up the results for copies that are followed since start. Then each rests for
// a while.
func (d *Daemon) takeCopies(ctx context.Context, st *state, wants []copies.Want, all map[tableid.TableID]copies.Copy, start time.Time) {
	end := time.Now()
	st.memory.ScheduleFree(end)
	for _, want := range wants {
		s, copied := st.standby[want.ID], all[want.ID]
		s.next = end.Add(s.kind.rest(end.Sub(start)))
		d.takeCopy(ctx, st, s, want, copied)
		if errors.Is(copied.Err, net.ErrClosed) {
			d.standbySocketGone(ctx, st, copied.Err)
		}
	}
}

// takeCopy takes up the result for one copy. The copy failed, is being written, lacks further
// pieces, stays as it was, or is ready to be opened.
func (d *Daemon) takeCopy(ctx context.Context, st *state, s *standbyOf, want copies.Want, copied copies.Copy) {
	written := s.kind.took(want, copied)
	switch err := copied.Err; {
	case errors.Is(err, copies.ErrMoved):
		st.looking.plan(time.Now()) // a commit of canaryd's own gives no hint
		return
	case errors.Is(err, copies.ErrUnread) && (s.has() || s.begun):
		if s.making.Failed(err, standby.ErrKernel, standby.ErrTaken) {
			severity.Warnings(klog.FromContext(ctx)).Info("The standby stays as it was: the table could not be read", "table", s.kind.name(), "reason", err)
		}
		return
	case err != nil:
		d.standbyFailed(ctx, st, s, err)
		return
	case copied.Writing:
		return
	}
	if s.begun = copied.Unfinished; s.begun {
		d.noteShut(st, s)
		s.state, s.reason, s.pieceAt = api.StandbyBuilding, "", time.Now().Add(pieceRest)
		return
	}
	s.making.Trouble.Over()
	if !written {
		return
	}
	had := s.has()
	s.copy, s.reason, s.making = copied, "", s.making.Over()
	if !s.gate.IsOpen() {
		s.state = api.StandbyArmed
	}
	if !had {
		klog.FromContext(ctx).Info("The standby is ready to translate while rules are missing",
			"table", s.kind.name(), "standby", standby.NameOf(s.id), "chains", copied.Chains, "uncopied", copied.Uncopied)
	}
}

// noteShut notes that an open gate was shut with its table, if it was open.
func (d *Daemon) noteShut(st *state, s *standbyOf) {
	if s.gate.IsOpen() {
		d.gateShut(st, s, time.Now())
	}
}

// standbyFailed notes that a copy could not be made, opened or shut, so that there is none. It
// plans the next try.
func (d *Daemon) standbyFailed(ctx context.Context, st *state, s *standbyOf, err error) {
	d.noteShut(st, s)
	s.state, s.reason, s.copy, s.begun = api.StandbyUnavailable, err.Error(), copies.Copy{}, false
	s.kind.gone()
	log := s.making.Failed(err, standby.ErrKernel, standby.ErrTaken)
	if s.native() && errors.Is(err, standby.ErrUnavailable) { // as long as the table is of its kind
		s.making.TryAt = time.Now().Add(pace.MakeAgain)
	}
	if log {
		severity.Notices(klog.FromContext(ctx)).Info("There is no standby: while rules are missing, new connections are not translated; nothing else depends on it",
			"table", s.kind.name(), "reason", err)
	}
}

// standbySocketGone notes that all copies were lost with their one socket.
func (d *Daemon) standbySocketGone(ctx context.Context, st *state, err error) {
	for _, s := range st.copies() {
		if s.has() {
			d.standbyFailed(ctx, st, s, err)
		}
	}
}

// releaseStandby deletes a copy, if there is one. into is its state from then on, and why the
// reason, as the status has them.
func (d *Daemon) releaseStandby(ctx context.Context, st *state, s *standbyOf, into api.StandbyState, why string) {
	if s.has() || s.begun || s.state == api.StandbyUnavailable {
		if err := d.cfg.Standby.Table.Release(s.id); err != nil {
			if s.making.Stays(err) {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "The standby's table could not be deleted yet", "table", s.kind.name(), "standby", standby.NameOf(s.id))
			}
			return
		}
		if s.has() || s.begun {
			klog.FromContext(ctx).Info("The standby's table is deleted", "table", s.kind.name(), "standby", standby.NameOf(s.id), "because", why)
		}
	}
	d.noteShut(st, s)
	if s.native() && st.native.tables[s.id] == nil {
		delete(st.standby, s.id)
		return
	}
	s.kind.gone()
	*s = standbyOf{id: s.id, kind: s.kind, state: into, reason: why, making: s.making.Over()}
}

// stopStandby deletes the copies after a cleanup.
func (d *Daemon) stopStandby(ctx context.Context, st *state) {
	for _, s := range st.copies() {
		d.releaseStandby(ctx, st, s, api.StandbyOff, whyCleanup)
	}
}

// standbys returns the states of the families' copies as a Status has them.
func (d *Daemon) standbys(st *state) map[rules.Family]api.FamilyStandby {
	all := map[rules.Family]api.FamilyStandby{}
	for f := range st.families {
		all[f] = api.FamilyStandby{State: api.StandbyOff, Reason: d.cfg.Standby.Off}
		if d.hasStandby() {
			all[f] = st.standby[f.Table(rules.Nat)].status(st)
		}
	}
	return all
}

// nativeStandbyOf returns the state of a native table's copy as a Status has it; nil if there
// is no standby for native tables.
func (d *Daemon) nativeStandbyOf(st *state, id tableid.TableID) *api.FamilyStandby {
	if off := d.cfg.Standby.NativeOff; off != "" {
		return &api.FamilyStandby{State: api.StandbyUnavailable, Reason: off}
	}
	if !d.hasNativeStandby() {
		return nil
	}
	now := st.standby[id].status(st)
	return &now
}

// status returns the state of a copy as a Status has it. A nil copy is not decided about yet,
// and counts as being built.
func (s *standbyOf) status(st *state) api.FamilyStandby {
	if s == nil || s.state == "" {
		return api.FamilyStandby{State: api.StandbyBuilding}
	}
	now := api.FamilyStandby{State: s.state, Reason: s.reason, OpenSince: s.gate.Opened, Chains: s.copy.Chains, Uncopied: s.copy.Uncopied}
	if !s.has() {
		return now
	}
	behind := false
	if now.Outstanding, behind = s.kind.behind(st); behind && s.state == api.StandbyArmed {
		now.State = api.StandbyBehind
	}
	return now
}
