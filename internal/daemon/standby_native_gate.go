package daemon

import (
	"cmp"
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file opens and shuts the gates of native tables' copies. One is open only while its table is
// judged to be lost and canaryd puts it back: never for what its owner may have done.

// wantsNativeOpen reports whether the table is lost and is being put back.
func (st *state) wantsNativeOpen(id tableid.TableID) bool {
	t := st.native.tables[id]
	return st.native.loss != nil && st.heals() && t != nil && t.want != nil && !t.old && t.lost() && t.finding.Remedy != native.NoRemedy
}

// mayOpenNative reports whether the gate of the table's copy is shut and to be opened.
func (st *state) mayOpenNative(id tableid.TableID) bool {
	s := st.native.standby[id]
	return s != nil && s.has() && !s.gate.isOpen() && st.wantsNativeOpen(id) && s.gate.mayOpen(st.native.loss.record.ID)
}

// openNativeAt returns when a gate is opened: at once, but only once for each loss.
func (d *Daemon) openNativeAt(st *state) time.Time {
	for id := range st.native.standby {
		if st.mayOpenNative(id) {
			return d.made
		}
	}
	return time.Time{}
}

// openNative opens the gates of what is lost, and returns how many commits of canaryd's own that
// took. Whatever becomes of it, the replay goes on.
func (d *Daemon) openNative(ctx context.Context, st *state) (commits int) {
	r := &st.native
	for _, id := range r.ids() {
		if !st.mayOpenNative(id) {
			continue
		}
		s, t, l := r.standby[id], r.tables[id], r.loss
		s.gate.try(l.record.ID)
		got, err := d.cfg.Standby.Table.Gate(StandbyWant{ID: id, Native: NativeWant{t.want, t.digest}}, s.openOrder(time.Now()))
		now := time.Now()
		commits += got.Commits
		if errors.Is(err, ErrStandbyOutdated) {
			severity.Warnings(d.nativeLog(ctx, st)).Info("The standby stays shut: its copy is out of date", "flush", l.record.ID, "table", id.NFT(),
				"behindSince", s.behindSince, "reason", err)
			continue
		}
		if err != nil && s.gate.ajar.met(err, now) {
			severity.Warnings(d.nativeLog(ctx, st)).Error(err, "The standby could not be opened; the replay does not wait for it", "flush", l.record.ID, "table", id.NFT())
		}
		if errors.Is(err, standby.ErrNotBuilt) { // its table went with another one's, or by its limit
			d.nativeStandbyFailed(ctx, id, s, err)
		}
		if err != nil || !got.Open {
			continue
		}
		s.gate.ajar.over()
		s.gate.open(now)
		if s.state = api.StandbyOpen; got.Outdated == nil {
			s.behindSince = time.Time{}
		}
		l.record.Standby = l.record.Standby.WithTable(id.NFT(), now.Sub(l.record.Time))
		severity.Notices(d.nativeLog(ctx, st)).Info("The standby translates until the native table is back"+got.less(),
			got.fields("flush", l.record.ID, "table", id.NFT(), "after", now.Sub(l.record.Time).Round(10*time.Microsecond))...)
		d.sweepNative([]*native.Table{t.want}, l.intact)
	}
	return commits
}

// firstNativeLookAt returns when native tables are looked at before iptables' tables are put back:
// where a copy may have to be opened, it does not wait for that.
func (d *Daemon) firstNativeLookAt(st *state) time.Time {
	if st.loss == nil || !st.mayOpenNatives() {
		return time.Time{}
	}
	return st.native.lookAt
}

// mayOpenNatives reports whether there is a copy of a native table that a flush may open.
func (st *state) mayOpenNatives() bool {
	if st.heals() {
		for _, s := range st.native.standby {
			if s.has() {
				return true
			}
		}
	}
	return false
}

// openNativeMeanwhile opens gates for what a flusher takes of native tables while canaryd waits for
// it: it may come to them last. asked is the genid at which that was asked last. It returns how
// many commits of canaryd's own that took.
func (d *Daemon) openNativeMeanwhile(ctx context.Context, st *state, asked *uint32) (commits int) {
	if !st.mayOpenNatives() {
		return 0
	}
	genid, err := d.cfg.Native.Kernel.Genid()
	if err != nil || genid == *asked {
		return 0 // a read comes in any case, and says what is wrong
	}
	*asked = genid
	d.lookNativeFirst(ctx, st)
	return d.openNative(ctx, st)
}

// lookNativeFirst looks at native tables, and judges those that a commit has deleted: there is
// nothing of them to be read.
func (d *Daemon) lookNativeFirst(ctx context.Context, st *state) {
	d.lookNative(ctx, st)
	r := &st.native
	for _, id := range r.ids() {
		t := r.tables[id]
		if t.want == nil || t.lost() || t.missed || r.all || t.old || t.accept || !t.gone() {
			continue
		}
		gone := nativeSight{Ruleset: &native.Ruleset{Genid: t.deeds[len(t.deeds)-1].Genid}}
		if f := d.judgeNative(id, t, gone, nil); f.Remedy != native.NoRemedy {
			t.finding = f
			d.loseNative(st, id)
		}
	}
}

// shutNativeAt returns when a gate is shut: as soon as it is not to be open any more.
func (d *Daemon) shutNativeAt(st *state) (first time.Time) {
	for id, s := range st.native.standby {
		first = earliest(first, s.gate.dueShut(st.wantsNativeOpen(id), d.made))
	}
	return first
}

// shutNativeStandby shuts the gates that are not to be open any more.
func (d *Daemon) shutNativeStandby(ctx context.Context, st *state) {
	r, now := &st.native, time.Now()
	for _, id := range r.standbyIDs() {
		s := r.standby[id]
		if s == nil || !s.gate.isOpen() {
			continue
		}
		switch wanted := st.wantsNativeOpen(id); {
		case !wanted:
			d.shutNativeTable(ctx, st, id, s)
		case !now.Before(s.gate.until):
			d.shutNativeTable(ctx, st, id, s)
			severity.Warnings(d.nativeLog(ctx, st)).Info("The standby translates no more, although a native table is still missing: what it has may be out of date",
				"flush", r.loss.record.ID, "table", id.NFT(), "limit", standbyMost)
		}
	}
}

// shutNativeTable shuts one gate. Whatever the kernel answers, no hook is open then.
func (d *Daemon) shutNativeTable(ctx context.Context, st *state, id tableid.TableID, s *nativeStandby) {
	got, err := d.cfg.Standby.Table.Gate(StandbyWant{ID: id}, ShutGate)
	open := nativeGateShut(st, s, cmp.Or(got.Shut, time.Now()))
	s.state = api.StandbyArmed
	if err != nil { // the table had to go
		d.nativeStandbyFailed(ctx, id, s, err)
	}
	if !got.Shut.IsZero() {
		severity.Warnings(klog.FromContext(ctx)).Info("The standby's limit shut it before canaryd did", "table", id.NFT(), "open", open.Round(10*time.Microsecond))
		return
	}
	klog.FromContext(ctx).V(1).Info("The standby is shut", "table", id.NFT(), "open", open.Round(10*time.Microsecond))
}

// nativeGateShut takes up that a gate is shut since at, and returns for how long it was open.
func nativeGateShut(st *state, s *nativeStandby, at time.Time) (open time.Duration) {
	open = s.gate.shut(at)
	if l := st.native.loss; l != nil {
		l.record.Standby = l.record.Standby.Ended(s.gate.total)
	}
	return open
}
