package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// The marks get a new nonce once a changed generation has been quiet for
	// rotateQuiet; on legacy that rewrites the whole table, so it may take no
	// more than 2 % of a core.
	rotateQuiet = 200 * time.Millisecond
	rotateShare = 49
	// Owners who are never quiet for so long get new marks all the same after
	// rotateMost: until then a file that was saved earlier passes for the present.
	rotateMost = 10 * time.Second
	// The disk gets a changed generation a moment later, and the news that
	// it is still in force every minute.
	saveQuiet    = time.Second
	saveShare    = 49
	confirmEvery = time.Minute
	// Memory is given back when nothing was read or written for freeMemoryQuiet, by
	// when the disk has what was learned. To collect 10 MiB takes 10 ms, so it
	// is done every freeMemoryPause at most.
	freeMemoryQuiet = 1500 * time.Millisecond
	freeMemoryPause = 30 * time.Second
)

// plant writes the first canaries and witnesses. Whatever is there when that
// is proved is the generation.
func (d *Daemon) plant(ctx context.Context, st *state) {
	log := klog.FromContext(ctx)
	families := d.plantable(st)
	if len(families) == 0 {
		st.plantAt = st.suspicion.tryAt
		return
	}
	result, err := d.replayer(ctx, st).Plant(ctx, d.job(st, families...))
	for f, fr := range result {
		d.applyResult(st, f, fr)
		d.countRefusal(f, fr.Err)
		err = errors.Join(err, fr.Err)
	}
	d.countLocked(st, result, err)
	if err == nil && !d.allPlanted(st) {
		err = errors.Join(unplanted(st, result), st.suspicion.why())
	}
	if err != nil {
		st.lookAt = time.Now()
		st.plantWait = longer(st.plantWait)
		if lockReason(err) {
			// It was waited for already, and is let go of at any moment.
			st.plantWait = firstTry
		}
		st.plantAt = time.Now().Add(st.plantWait)
		if st.unplanted.met(err, time.Now()) {
			log.Error(err, "Not every table has a canary; a flush of those without one is not noticed", "retryIn", st.plantWait)
		}
		return
	}
	st.plantWait = 0
	st.unplanted.over()
	st.lookAt = time.Now()
	if st.mode == api.Observe && st.declared != nil {
		st.compare(st.lookAt)
	}
	want := st.want()
	count, chains := want.Counts()
	log.Info("Canaries are planted and the generation is captured",
		"chain", d.cfg.Canary, "generation", want.ID(), "rules", count, "chains", chains)
}

// unplanted says which tables got no canary although nothing failed: those
// that could not be read.
func unplanted(st *state, result reload.Result) error {
	var errs []error
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			if tr, ok := result[f].Tables[t]; ok && tr.Mark.Nonce == "" && !st.families[f].tables[t].spared {
				errs = append(errs, fmt.Errorf("%s %s: %w", f, t, tr.Finding.Err))
			}
		}
	}
	return errors.Join(errs...)
}

// planRotation asks for a new nonce when the owners have been quiet.
func (fs *familyState) planRotation(now time.Time) {
	fs.rotateAt = latest(now.Add(rotateQuiet), fs.rotateAt)
	if fs.rotateBy.IsZero() {
		fs.rotateBy = now.Add(rotateMost)
	}
}

// putOffRotation has marks that were to be renewed wait until then at least.
func (fs *familyState) putOffRotation(until time.Time) {
	fs.rotateAt, fs.rotateBy = latest(fs.rotateAt, until), latest(fs.rotateBy, until)
}

// rotationAt returns when the family's marks may be renewed, zero for not before
// something is examined: at best while nothing waits for an examination or for an
// owner, and while something always does, at last beside it. That is safe, because
// who renews them reads under guard, and leaves alone what it finds lost.
func rotationAt(fs *familyState) time.Time {
	if fs.trouble.there() || fs.unread.there() {
		return time.Time{}
	}
	at := fs.rotateAt
	for _, ts := range fs.tables {
		switch {
		case ts.learningStopped:
			return time.Time{}
		case ts.pending || !fs.dirty.IsZero():
			at = fs.rotateBy
		}
	}
	return at
}

// rotate renews the nonce of families whose generation changed, so that a file
// that was saved before the change is known when somebody restores it.
func (d *Daemon) rotate(ctx context.Context, st *state) {
	var families []rules.Family
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && due(rotationAt(fs), time.Now()) {
			families = append(families, f)
		}
	}
	start := time.Now()
	result, err := d.replayer(ctx, st).Rotate(ctx, d.job(st, families...))
	cost := time.Since(start)
	for _, f := range families {
		fs := st.families[f]
		fs.rotateAt, fs.rotateBy = time.Time{}, time.Time{}
		fr, ok := result[f]
		if ok {
			d.applyResult(st, f, fr)
		}
		if ferr := errors.Join(err, fr.Err); ferr != nil {
			// A flush came in between, or the lock is held: look, then again.
			klog.FromContext(ctx).V(1).Info("The marks could not be renewed yet", "family", f, "reason", ferr)
			fs.putOffRotation(time.Now().Add(max(d.cfg.PollInterval, rotateShare*cost)))
			st.lookAt = time.Now()
			continue
		}
		if !fs.rotateAt.IsZero() {
			fs.putOffRotation(time.Now().Add(rotateShare * cost))
		}
	}
}

// save writes marks at once and a changed generation when its time has come,
// and plans the next confirmation. While something is lost or unknown, nothing
// is confirmed and no generation is written; the marks are all the same, or
// the next start would take those of a renewal for somebody else's.
func (d *Daemon) save(ctx context.Context, st *state, last bool) {
	st.markedAt = time.Time{}
	d.keepOwners(ctx, st, last)
	if d.sound(st) {
		d.captureSets(ctx, st, last || due(st.saveAt, time.Now()))
	}
	if d.cfg.Store == nil || st.removed {
		st.saveAt = time.Now().Add(confirmEvery)
		return
	}
	start := time.Now()
	if !d.keepDecision(ctx, st) {
		st.saveAt = start.Add(confirmEvery) // what is on disk shows the loss
		return
	}
	var err error
	switch sound := d.sound(st); {
	case !sound:
		st.saveAt = start.Add(confirmEvery)
	case last || due(st.saveAt, start) || !d.cfg.Store.Holds():
		err = d.saveGeneration(st)
		st.savedAt, st.saveCost = time.Now(), time.Since(start)
		st.saveAt = st.savedAt.Add(confirmEvery)
		d.confirm(st)
	default:
		d.confirm(st)
	}
	if err == nil && d.cfg.Store.Holds() {
		err = d.saveMarks(st, st.marks)
	}
	st.stored = d.cfg.Store.List()
	if err != nil {
		klog.FromContext(ctx).Error(err, "The generation is not on disk; after a restart canaryd would begin anew")
	}
}

// planSave has the generation written once it has been quiet for a moment.
func (st *state) planSave(now time.Time) {
	st.saveAt = earliest(st.saveAt, latest(now.Add(saveQuiet), st.savedAt.Add(saveShare*st.saveCost)))
	st.scheduleFreeMemory(st.saveAt)
}

// saveGeneration writes what ought to be in force.
func (d *Daemon) saveGeneration(st *state) error {
	return d.cfg.Store.Save(reload.Stored{Source: d.cfg.Source, Made: st.made, Captured: st.captured, Generation: st.want()})
}

// saveMarks writes the state with these marks. It confirms nothing.
func (d *Daemon) saveMarks(st *state, marks canary.Marks) error {
	st.kept = st.keep(marks)
	return d.cfg.Store.SaveState(reload.State{Confirmed: st.confirmed, Uptime: st.uptime, Marks: st.kept, Quarantine: st.quarantine, MadeTables: st.madeTables})
}

// beforeWrite keeps the marks that a write is about to plant: if canaryd is killed
// before it has proved and saved them, the next start knows them for its own, and
// takes them neither for an old file's nor for a stranger's. A disk that fails
// puts no replay off.
func (d *Daemon) beforeWrite(ctx context.Context, st *state) func(canary.Marks) {
	if d.cfg.Store == nil {
		return nil
	}
	return func(marks canary.Marks) {
		if st.removed || !d.cfg.Store.Holds() {
			return // the next start begins anew
		}
		if err := d.saveMarks(st, marks); err != nil {
			klog.FromContext(ctx).V(1).Info("The marks that are about to be planted are not on disk", "reason", err)
		}
	}
}

// scheduleFreeMemory notes that something is read or written at that time which leaves memory
// behind.
func (st *state) scheduleFreeMemory(at time.Time) {
	st.freeMemoryAt = latest(st.freeMemoryAt, latest(at.Add(freeMemoryQuiet), st.memoryFreed.Add(freeMemoryPause)))
}

// freeMemory gives memory back to the kernel.
func (d *Daemon) freeMemory(_ context.Context, st *state) {
	st.freeMemoryAt, st.memoryFreed = time.Time{}, time.Now()
	if d.cfg.FreeMemory != nil {
		d.cfg.FreeMemory()
	}
}

// sound reports whether the last look showed everything in force.
func (d *Daemon) sound(st *state) bool {
	if st.loss != nil || !st.learningStoppedSince.IsZero() {
		return false
	}
	return !d.anyFamily(st, func(fs *familyState) bool {
		for _, ts := range fs.tables {
			if ts.verdict.Loss() || ts.verdict == canary.Unknown {
				return true
			}
		}
		return false
	})
}

// lockReason tells the lock from other reasons for which nothing was written.
func lockReason(err error) bool { return errors.Is(err, iptables.ErrLocked) }
