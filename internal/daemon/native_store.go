package daemon

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeDisk is the stored state of native tables, and the time of its next write.
type nativeDisk struct {
	saveAt    time.Time     // zero: nothing is to be written
	savedAt   time.Time     // when it was last written
	cost      time.Duration // of the last write
	kept      []nativestore.Header
	confirmed time.Duration // the machine's uptime when all were in force
	lastRun   time.Time     // when the last run knew that
	trouble   pace.Trouble  // why they are not on disk
	keptAt    time.Time     // when they were last written
	// changes counts the changes of the guarded tables; keptChanges: until keptAt.
	changes, keptChanges int
	retry                pace.Retry   // of a write that failed
	unpruned             pace.Trouble // why old generations could not be removed
}

// changed plans to write the tables a moment later, and not so often that writes take more than
// 2 % of the time.
func (s *nativeDisk) changed(now time.Time) {
	s.saveAt = pace.Earliest(s.saveAt, pace.Latest(now.Add(saveQuiet), s.savedAt.Add(saveShare*s.cost)))
}

// moved is changed for a table with other content, and for one that is new or gone. It counts
// these: if a write fails, the status says how many the disk lacks.
func (s *nativeDisk) moved(now time.Time) {
	s.changes++
	s.changed(now)
}

// saveNative writes the tables, and until when they were known to be in force. It is a chore:
// after changes, and else about once in confirmEvery. If the write fails, it tries to leave a
// note on disk (nativeBehind).
func (d *Daemon) saveNative(ctx context.Context, st *state) {
	r := &st.native
	r.disk.saveAt = time.Time{}
	switch {
	case d.cfg.Native.Store == nil || st.removed:
		return
	case !r.begun:
		r.disk.saveAt = time.Now().Add(confirmEvery)
		return
	}
	start := time.Now()
	if !d.keepUnread(ctx, st) {
		r.disk.retry.Failed(nil, start)
		r.disk.saveAt = r.disk.retry.At
		return
	}
	up := d.cfg.Uptime() - time.Since(start)
	if d.nativeSound(st) && !r.known.IsZero() {
		r.disk.confirmed = up - start.Sub(r.known)
	}
	r.disk.savedAt = start
	changes, stored := r.disk.changes, nativestore.Stored{Confirmed: r.disk.confirmed, Tables: []nativestore.Row{}}
	for _, id := range r.ids() {
		t := r.tables[id]
		if t.drill {
			continue
		}
		if t.out != nil {
			if held := st.quarantine.Held(id); t.lost() || len(held) > 0 {
				stored.LeftOut = append(stored.LeftOut, nativestore.LeftOut{ID: id, Handle: t.want.Handle, Finding: t.finding, Held: held})
			}
			continue
		}
		row := nativestore.Row{Witness: t.witness, Verdict: t.finding.Verdict, Held: st.quarantine.Held(id),
			Generation: nativestore.GenerationOf(t.want, t.digest, t.made, t.captured, up-start.Sub(t.leftAt))}
		if len(t.policies.Drops) > 0 {
			row.Policies = maps.Clone(t.policies.Known) // a dismissal changes them
		}
		stored.Tables = append(stored.Tables, row)
	}
	var err, unpruned error
	d.beginSaving(ctx, st, func() {
		if err = d.cfg.Native.Store.Save(stored); err == nil { // a file that cannot be removed costs room, and no table
			unpruned = d.cfg.Native.Store.Prune(stored)
		}
	}, func(ctx context.Context, st *state) { d.tookNative(ctx, st, start, changes, err, unpruned) })
}

// tookNative takes up a write of the tables, which began at start, with so many changes. Changes
// since then have planned the next one.
func (d *Daemon) tookNative(ctx context.Context, st *state, start time.Time, changes int, err, unpruned error) {
	r := &st.native
	r.disk.savedAt, r.disk.cost = time.Now(), time.Since(start)
	r.disk.saveAt = pace.Earliest(r.disk.saveAt, r.disk.savedAt.Add(max(confirmEvery, saveShare*r.disk.cost)))
	if err == nil {
		r.disk.unpruned.Report(pace.Warnings(ctx), unpruned, "Old generations of native tables could not be removed; they take room on the disk")
		r.disk.retry, r.disk.keptAt, r.disk.keptChanges = pace.Retry{}, r.disk.savedAt, changes
	} else {
		r.disk.retry.Failed(nil, r.disk.savedAt)
		r.disk.saveAt = pace.Latest(r.disk.retry.At, r.disk.savedAt.Add(saveShare*r.disk.cost))
	}
	r.disk.kept = d.cfg.Native.Store.List()
	d.countStateError(err)
	d.tookWrite(ctx, &r.disk.trouble, err, d.cfg.Store.SaveNativeBehind, d.nativeBehind(st))
}

// recallNative takes up the tables that the last run guarded. The first read shows their state.
// Tables that were last known to be in force longer ago than --max-stored-age are not put back.
func (d *Daemon) recallNative(ctx context.Context, st *state) {
	if !d.guardsNative() || d.cfg.Native.Store == nil {
		return
	}
	stored, err := d.cfg.Native.Store.Load()
	for _, u := range stored.Unread {
		if u.File != d.cfg.Native.Store.Path() || reload.OfThisBoot(u.File, d.booted()) { // a name in it is of here
			d.noteUnread(ctx, st, u)
		}
	}
	if err != nil {
		pace.Unusable(klog.FromContext(ctx), err).Error(err, "Stored native tables are not used; canaryd starts from the tables in the kernel")
	}
	if len(stored.Tables) == 0 && err != nil {
		return
	}
	stored.Tables = d.recallNativeBehind(ctx, st, stored)
	r, now := &st.native, time.Now()
	age := d.cfg.Uptime() - stored.Confirmed
	if age < 0 {
		return // another clock, as in a time namespace: nothing can be said of how old it is
	}
	r.disk.confirmed, r.disk.lastRun, r.disk.saveAt = stored.Confirmed, now.Add(-age), now.Add(confirmEvery) // also if nothing changes
	if stored.Confirmed > 0 {
		r.disk.keptAt = r.disk.lastRun
	}
	for _, s := range stored.Tables {
		g := s.Generation
		if !d.cfg.Native.Protects(g.Table.ID) {
			continue
		}
		if !r.room(g.Table.ID, d.cfg.Native.Named, nil) { // another --protect let the last run guard others
			r.overLimit++
			continue
		}
		t := &nativeTable{want: g.Table, witness: s.Witness, digest: g.Table.Digest(), missed: true, unheard: true, old: age > d.cfg.MaxStoredAge,
			made: g.Made, captured: g.Captured, read: now.Add(-(d.cfg.Uptime() - g.Read)), wrote: now}
		t.leftAt = t.read
		t.policies.Known, t.inForce = s.Policies, s.InForce
		if s.Verdict == native.Unattributed {
			t.finding.Verdict = s.Verdict
		}
		r.tables[g.Table.ID] = t
		d.setQuarantine(ctx, st, g.Table.ID, nil, s.Held, quarantine.Recall)
	}
	for _, s := range stored.LeftOut {
		if r.tables[s.ID] == nil && d.cfg.Native.Protects(s.ID) {
			t := &nativeTable{want: &native.Table{ID: s.ID, Handle: s.Handle}, out: &nativeLeftOut{probe: now}, wrote: now, missed: true, unheard: true, finding: s.Finding}
			r.tables[s.ID] = t
			d.setQuarantine(ctx, st, s.ID, nil, s.Held, quarantine.Recall)
			st.quarantine.Plan(s.ID, time.Time{})
		}
	}
	r.disk.kept = d.cfg.Native.Store.List()
	d.noteOverLimit(ctx, r, r.overLimit)
	if len(r.tables) > 0 {
		klog.FromContext(ctx).Info("Took up the stored native tables", "tables", len(r.tables), "age", age.Round(time.Second))
	}
}

// leaveNative looks once more at the end of a run, and saves the tables.
func (d *Daemon) leaveNative(ctx context.Context, st *state) {
	if r := &st.native; len(r.drill.tables) > 0 || !r.drill.removeAt.IsZero() {
		r.forgetDrillTables()
		d.removeDrillTables(ctx, st)
	}
	if !d.guardsNative() {
		return
	}
	if !st.removed && st.native.loss == nil {
		d.lookNative(ctx, st)
	}
	d.saveNative(ctx, st)
}

// stopNative removes canaryd's witnesses and its state of native tables, also on disk, after a
// cleanup.
func (d *Daemon) stopNative(st *state) error {
	if !d.guardsNative() {
		return nil
	}
	st.native = nativeRealm{tables: map[tableid.TableID]*nativeTable{}}
	var errs []error
	if d.cfg.Native.RemoveDrills != nil {
		errs = append(errs, d.cfg.Native.RemoveDrills())
	}
	if d.cfg.Native.Cleanup != nil {
		errs = append(errs, d.cfg.Native.Cleanup())
	}
	if d.cfg.Native.Store != nil {
		errs = append(errs, nativestore.Forget(filepath.Dir(d.cfg.Native.Store.Path())))
	}
	return errors.Join(errs...)
}
