package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
)

const (
	// A changed generation is written to disk a moment later, and the confirmation that it is
	// still in force every minute.
	saveQuiet    = time.Second
	saveShare    = 49
	confirmEvery = time.Minute
)

// saving is the content of the state folder, and the times of its next writes.
type saving struct {
	markedAt time.Time // since when marks are not on disk; zero: all are
	saveAt   time.Time // when the generation is written; zero: nothing to write
	savedAt  time.Time
	cost     time.Duration          // of the last save
	retry    pace.Retry             // of a save that failed
	trouble  pace.Trouble           // why the last one failed
	noBytes  pace.Trouble           // why the bytes of rules are not on disk
	keptAt   time.Time              // when the state was last written, with the present generation
	written  int                    // the number of changes that the generation's file has
	kept     int                    // the number of changes that the state names
	remade   int                    // how often the folder was made again, as last seen
	marks    canary.Marks           // as the disk has them
	stored   []api.StoredGeneration // the generations on disk
	folded   []string               // IDs of records in which flushes were counted since they were written
}

// saveSoon plans to write the generation a moment later.
func (s *saving) saveSoon(now time.Time) { s.saveAt = pace.Earliest(s.saveAt, now.Add(saveQuiet)) }

// marksChanged plans to write the state, because the disk has other marks.
func (s *saving) marksChanged(now time.Time) { s.markedAt = pace.Earliest(s.markedAt, now) }

// save writes marks at once and a changed generation when it is due, or at the end of the run
// (last). It plans the next confirmation. While something is lost or unknown, it confirms
// nothing and writes no generation. But it writes the marks: otherwise the next start would not
// know renewed marks as canaryd's own.
func (d *Daemon) save(ctx context.Context, st *state, last bool) {
	st.disk.markedAt = time.Time{}
	d.keepOwners(ctx, st, last)
	d.writeFolded(ctx, st)
	if d.sound(st) {
		d.captureSets(ctx, st, last || pace.Due(st.disk.saveAt, time.Now()))
	}
	if d.cfg.Store == nil || st.removed {
		st.disk.saveAt = time.Now().Add(confirmEvery)
		return
	}
	start := time.Now()
	if !d.keepWaiting(ctx, st) {
		st.disk.failed(start)
		return
	}
	switch sound := d.sound(st); {
	case !sound:
		st.disk.saveAt = start.Add(confirmEvery)
	case last || pace.Due(st.disk.saveAt, start) || !d.cfg.Store.Holds():
		d.beginGeneration(ctx, st, start)
		return
	}
	d.saveState(ctx, st, nil)
}

// keepWaiting writes all that waits for an operator to disk. If that fails, no state and no
// generation may be written: the stored files show the loss.
func (d *Daemon) keepWaiting(ctx context.Context, st *state) bool {
	return d.keepDecision(ctx, st) && d.keepUnread(ctx, st)
}

// beginGeneration begins to write the generation that ought to be in force, and then writes the
// state that names it. Changes during the write plan the next one.
func (d *Daemon) beginGeneration(ctx context.Context, st *state, start time.Time) {
	write, end := d.cfg.Store.BeginSave(d.toStore(st))
	changes := st.generation.changes
	st.disk.saveAt, st.disk.savedAt = time.Time{}, start
	d.beginSaving(ctx, st, write, func(ctx context.Context, st *state) {
		err, bytesErr := end()
		st.disk.savedAt, st.disk.cost = time.Now(), time.Since(start)
		st.disk.saveAt = pace.Earliest(st.disk.saveAt, st.disk.savedAt.Add(confirmEvery))
		if err == nil {
			st.disk.written = changes
			d.tookBytes(ctx, st, bytesErr)
		}
		d.saveState(ctx, st, err)
	})
}

// beginSaving begins a write to disk. The loop does take when it has ended, and goes on
// meanwhile. So what is said to be on disk is there. At the end of a run it follows the one
// before.
func (d *Daemon) beginSaving(ctx context.Context, st *state, write func(), take step) {
	d.awaitSaving(ctx, st)
	st.saving = take
	d.saver.todo <- write
}

// endSaving takes up a write that has ended. That may begin another.
func (d *Daemon) endSaving(ctx context.Context, st *state) {
	take := st.saving
	st.saving = nil
	take(ctx, st)
}

// awaitSaving waits until nothing is being written to disk. Requests and the end of the run call
// it.
func (d *Daemon) awaitSaving(ctx context.Context, st *state) {
	for st.saving != nil {
		<-d.saver.done
		d.endSaving(ctx, st)
	}
}

// saveState writes the state, unless the generation could not be written (err).
func (d *Daemon) saveState(ctx context.Context, st *state, err error) {
	if !d.keepWaiting(ctx, st) {
		st.disk.failed(time.Now())
		return
	}
	if d.sound(st) {
		d.confirm(st)
	}
	if err == nil && len(st.unread.files) > 0 && d.sound(st) {
		d.dropStanding(ctx, st, false, func(id string) bool { return id == st.want().ID() })
	}
	tried := err != nil || d.cfg.Store.Holds()
	if err == nil && tried {
		err = d.saveMarks(st, st.marks.current)
	}
	st.disk.stored = storedOf(d.cfg.Store.List())
	if err != nil {
		st.disk.marks = st.marksToKeep(st.marks.current)
	}
	if tried {
		d.tookSave(ctx, st, err)
	}
	if err != nil {
		st.disk.failed(time.Now())
	}
}

// planSave plans to write the generation once it has been quiet for a moment.
func (st *state) planSave(now time.Time) {
	st.disk.saveAt = pace.Earliest(st.disk.saveAt, pace.Latest(now.Add(saveQuiet), st.disk.savedAt.Add(saveShare*st.disk.cost)))
	st.memory.ScheduleFree(st.disk.saveAt)
}

// toStore returns the generation that ought to be in force, with its origin.
func (d *Daemon) toStore(st *state) reload.Stored {
	return reload.Stored{Source: d.cfg.Source, Made: st.generation.made, Captured: st.generation.captured, Generation: st.want()}
}

// tookBytes notes why the bytes of a saved generation's rules are not on disk: with them a replay
// needs no iptables. That does not concern the generation: the next confirmation tries again.
func (d *Daemon) tookBytes(ctx context.Context, st *state, err error) {
	if st.disk.noBytes.Report(pace.Warnings(ctx), err, "The bytes of rules are not on disk; iptables will write rules that are flushed while canaryd is down") {
		klog.FromContext(ctx).Info("The bytes of rules are on disk again")
	}
}

// saveMarks writes the state with these marks: the present ones, or marks that a write is about
// to plant. It confirms nothing.
func (d *Daemon) saveMarks(st *state, marks canary.Marks) error {
	st.disk.marks = st.marksToKeep(marks)
	err := d.cfg.Store.SaveState(reload.State{Confirmed: st.absence.confirmed, Uptime: st.absence.uptime, Marks: st.disk.marks, Quarantine: st.quarantine.Rules(),
		MadeTables: st.marks.madeTables, Policies: st.knownPolicies(), Pause: d.pauseToKeep(st)})
	if err == nil && !st.disk.lacksGeneration(st) {
		st.disk.keptAt, st.disk.kept = time.Now(), st.disk.written
	}
	return err
}

// beforeWrite saves the marks that a write is about to plant. If canaryd is killed before the
// proof, the next start knows them as its own, and does not take them for an old file's. A disk
// that fails delays no replay.
func (d *Daemon) beforeWrite(ctx context.Context, st *state) func(canary.Marks) {
	if d.cfg.Store == nil {
		return nil
	}
	return func(marks canary.Marks) {
		if st.removed || !d.cfg.Store.Holds() {
			return // the next start has nothing to take up
		}
		d.tookSave(ctx, st, d.saveMarks(st, marks))
	}
}

// marksToKeep returns the marks that belong on disk. If observe mode has replanted marks after
// a loss, the disk keeps the lost marks. A later restore, or a start in heal mode, must still
// find the loss.
func (st *state) marksToKeep(marks canary.Marks) canary.Marks {
	for id, ts := range st.tables() {
		if ts.learningStopped {
			marks = marks.With(id, st.disk.marks[id])
		}
	}
	return marks
}

// sound reports whether everything was in force when it was last looked at. Only then a
// generation is written or confirmed.
func (d *Daemon) sound(st *state) bool {
	return st.loss == nil && st.observedSince.IsZero() && !st.anyFamily(func(fs *familyState) bool { return fs.lost() || fs.unknown() })
}
