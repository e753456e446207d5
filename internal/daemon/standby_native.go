package daemon

import (
	"context"
	"errors"
	"maps"
	"net"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// nativeStandbyFrom is from how many sets on --standby=auto copies a native table. The kernel
	// takes a replay of kube-proxy's 1,198 sets of 1,000 services in 0.35 to 0.9 s, of its 127 sets
	// of 100 services in 7 ms (Linux 6.18), and the time grows with the square.
	nativeStandbyFrom = 400
	// nativeFollowMost bounds the time between two changes of a copy. What is outstanding goes into
	// the transaction that opens it.
	nativeFollowMost = 30 * time.Second
)

// nativeStandby is what the loop knows of the copy of one native table.
type nativeStandby struct {
	state  api.StandbyState
	reason string
	copy   StandbyCopy
	of     native.Digest // what was copied
	begun  bool          // the copy is being built
	next   time.Time     // not before: it is written again
	// behindSince is when the first change was learned that the kernel's copy lacks; zero: it lacks
	// none.
	behindSince time.Time
	making      making
	gate        gate
}

// behind notes that another content of the table was learned.
func (s *nativeStandby) behind(learned time.Time) {
	if s != nil && s.has() && s.behindSince.IsZero() {
		s.behindSince = learned
	}
}

// openOrder returns how the gate is opened: not without what is outstanding, if the copy is behind
// for standbyMost. An owner may have removed what it still has.
func (s *nativeStandby) openOrder(now time.Time) GateOrder {
	if !s.behindSince.IsZero() && now.Sub(s.behindSince) >= standbyMost {
		return OpenCurrent
	}
	return OpenGate
}

// has reports whether there is a copy that may be opened.
func (s *nativeStandby) has() bool {
	return s.state == api.StandbyArmed || s.state == api.StandbyOpen
}

func (d *Daemon) hasNativeStandby() bool { return d.cfg.Standby.Table != nil && d.guardsNative() }

// standbyIDs returns the tables that have a copy, and those that may get one.
func (r *nativeRealm) standbyIDs() []tableid.TableID {
	all := r.ids()
	for id := range r.standby {
		if r.tables[id] == nil {
			all = append(all, id)
		}
	}
	slices.SortFunc(all, tableid.TableID.Compare)
	return all
}

// nativeStandbyWanted says whether a table is to have a copy, and else why not. It is not known
// while the table may not be as its owner wants it: a copy of what a flush left would be none.
func (d *Daemon) nativeStandbyWanted(st *state, id tableid.TableID) (idle string, known bool) {
	r, t := &st.native, st.native.tables[id]
	switch {
	case st.mode != api.Heal:
		return "observe mode writes nothing but marks", true
	case t == nil:
		return "no table of that name is guarded", r.loss == nil
	case r.loss != nil, r.all, t.want == nil, t.lost(), t.missed, t.old, !t.dirty.IsZero():
		return "", false
	case !standby.Translates(t.want):
		return "none of its chains translates", true
	case d.cfg.Standby.Auto && len(t.want.Sets) < d.nativeLeast(r.standby[id]):
		return "a replay is short enough without", true
	}
	return "", true
}

// nativeLeast is from how many sets on a table gets a copy. One that is there stays until the table
// is half as large: its size may go up and down.
func (d *Daemon) nativeLeast(s *nativeStandby) int {
	if s != nil && s.has() {
		return nativeStandbyFrom / 2
	}
	return nativeStandbyFrom
}

// followNativeAt returns when a copy is decided about.
func (d *Daemon) followNativeAt(st *state) (first time.Time) {
	if !d.hasNativeStandby() {
		return time.Time{}
	}
	for _, id := range st.native.standbyIDs() {
		first = earliest(first, d.followTableAt(st, id))
	}
	return first
}

func (d *Daemon) followTableAt(st *state, id tableid.TableID) time.Time {
	idle, known := d.nativeStandbyWanted(st, id)
	s := st.native.standby[id]
	switch {
	case !known, s != nil && s.gate.isOpen():
		return time.Time{}
	case s == nil:
		return d.made
	case !s.making.tryAt.IsZero():
		return s.making.tryAt
	case idle != "":
		if s.reason == idle && st.native.tables[id] != nil {
			return time.Time{}
		}
		return d.made
	case s.begun:
		return latest(d.made, s.next)
	case s.has() && s.of == st.native.tables[id].digest:
		return time.Time{}
	}
	return latest(d.made, s.next)
}

// followNative makes, follows or deletes the copies of native tables that are due.
func (d *Daemon) followNative(ctx context.Context, st *state) {
	r, now := &st.native, time.Now()
	for _, id := range r.standbyIDs() {
		if !due(d.followTableAt(st, id), now) {
			continue
		}
		s := r.standby[id]
		if s == nil {
			s = &nativeStandby{}
			r.standby[id] = s
		}
		s.making.tryAt = time.Time{}
		idle, _ := d.nativeStandbyWanted(st, id)
		switch {
		case st.mode != api.Heal:
			d.releaseNative(ctx, st, id, api.StandbyOff, idle)
		case idle != "":
			d.releaseNative(ctx, st, id, api.StandbyIdle, idle)
		default:
			d.copyNative(ctx, st, id, s)
		}
	}
}

// copyNative brings one copy to what ought to be in force. Changes are followed once a second at
// most, and for 2 % of the time.
func (d *Daemon) copyNative(ctx context.Context, st *state, id tableid.TableID, s *nativeStandby) {
	t, start := st.native.tables[id], time.Now()
	copied := d.cfg.Standby.Table.Follow(ctx, StandbyWant{ID: id, Native: NativeWant{t.want, t.digest}})[id]
	end := time.Now()
	st.memory.scheduleFree(end)
	s.next = end.Add(min(max(standbyEvery, (standbyShare-1)*end.Sub(start)), nativeFollowMost))
	if copied.Err != nil {
		d.nativeStandbyFailed(ctx, id, s, copied.Err)
		if errors.Is(copied.Err, net.ErrClosed) {
			d.standbySocketGone(ctx, st, copied.Err)
		}
		return
	}
	if s.begun = copied.Unfinished; s.begun {
		s.state, s.reason, s.next = api.StandbyBuilding, "", end.Add(pieceRest)
		return
	}
	had := s.has()
	s.state, s.reason, s.copy, s.of, s.making = api.StandbyArmed, "", copied, t.digest, s.making.over()
	s.behindSince = time.Time{}
	if !had {
		klog.FromContext(ctx).Info("The standby is ready to translate while a native table is missing",
			"table", id.NFT(), "standby", standby.NameOf(id), "chains", copied.Chains)
	}
}

// nativeStandbyFailed takes up that there is no copy, plans the next try, and logs why.
func (d *Daemon) nativeStandbyFailed(ctx context.Context, id tableid.TableID, s *nativeStandby, err error) {
	s.begun, s.state, s.reason, s.copy, s.of = false, api.StandbyUnavailable, err.Error(), StandbyCopy{}, native.Digest{}
	s.behindSince = time.Time{}
	log := s.making.failed(err, standby.ErrKernel, standby.ErrTaken)
	if errors.Is(err, standby.ErrUnavailable) { // as long as the table is of its kind
		s.making.tryAt = time.Now().Add(makeAgain)
	}
	if log {
		severity.Notices(klog.FromContext(ctx)).Info("There is no standby of a native table: while it is missing, new connections are not translated; nothing else depends on it",
			"table", id.NFT(), "reason", err)
	}
}

// releaseNative deletes a table's copy, if there is one.
func (d *Daemon) releaseNative(ctx context.Context, st *state, id tableid.TableID, into api.StandbyState, why string) {
	s := st.native.standby[id]
	if s.has() || s.begun || s.state == api.StandbyUnavailable {
		if err := d.cfg.Standby.Table.Release(id); err != nil {
			if s.making.stays(err) {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "The standby's table stays for now", "table", id.NFT(), "standby", standby.NameOf(id))
			}
			return
		}
		if s.has() || s.begun {
			klog.FromContext(ctx).Info("The standby's table is deleted", "table", id.NFT(), "standby", standby.NameOf(id), "because", why)
		}
	}
	if s.gate.isOpen() {
		nativeGateShut(st, s, time.Now())
	}
	if st.native.tables[id] == nil {
		delete(st.native.standby, id)
		return
	}
	*s = nativeStandby{state: into, reason: why, making: s.making.over()}
}

// stopNativeStandby deletes the copies after a cleanup.
func (d *Daemon) stopNativeStandby(ctx context.Context, st *state) {
	if !d.hasNativeStandby() {
		return
	}
	for _, id := range slices.SortedFunc(maps.Keys(st.native.standby), tableid.TableID.Compare) {
		d.releaseNative(ctx, st, id, api.StandbyOff, "canaryd's marks were removed on request")
	}
}

// nativeStandbyOf returns the state of a table's standby as a Status has it.
func (d *Daemon) nativeStandbyOf(st *state, id tableid.TableID) *api.FamilyStandby {
	if off := d.cfg.Standby.NativeOff; off != "" {
		return &api.FamilyStandby{State: api.StandbyUnavailable, Reason: off}
	}
	if !d.hasNativeStandby() {
		return nil
	}
	s := st.native.standby[id]
	if s == nil {
		return &api.FamilyStandby{State: api.StandbyBuilding}
	}
	now := &api.FamilyStandby{State: s.state, Reason: s.reason, OpenSince: s.gate.opened, Chains: s.copy.Chains}
	if t := st.native.tables[id]; s.state == api.StandbyArmed && (t.digest != s.of || !t.dirty.IsZero()) {
		now.State = api.StandbyBehind
	}
	return now
}
