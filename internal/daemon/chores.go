package daemon

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
)

// A step is one stretch of work. It leaves the next due times in the state.
type step func(context.Context, *state)

// A chore is one kind of work of the loop. The loop runs the first chore that is due, and
// sleeps until the next due time.
type chore struct {
	name string
	// at returns when the chore is due; zero: it has nothing to do. After do it must be later
	// than now, or zero, even if do failed; otherwise the loop spins. It is called only if may
	// allows.
	at func(*state) time.Time
	// may reports whether the chore may run now; nil: always. The loop does not wake up for a
	// change of that, because another step makes it.
	may func(*state) bool
	// limit is how long it may take. After that canaryd counts as hanging, and is restarted.
	limit time.Duration
	do    step
}

const (
	// readLimit is for a chore that reads. At 5,000 services a first read takes 3 s. A child is
	// killed after 30 s, and so is a read without an end. There are two families.
	readLimit = 3 * time.Minute
	// writeLimit is for a chore that writes. At 5,000 services a replay takes 2 s, and
	// 13 s by iptables-restore. It may wait 5 s for the xtables lock; iptables-restore is
	// killed after 2 minutes, and each family is read before and after it. A chore with that
	// limit or more waits while a copy of the standby is written (runnable).
	writeLimit = 10 * time.Minute
	// diskLimit is for a chore that writes to disk, and may execute ipset for each set.
	diskLimit = 5 * time.Minute
	// briefLimit is for a chore that exchanges little or nothing with the kernel.
	briefLimit = time.Minute
)

// settleLimit returns how long a chore may take that waits for the flusher first. It waits ten
// times --settle at most, and meanwhile probes the tables that the flusher restores.
func (d *Daemon) settleLimit() time.Duration { return writeLimit + readLimit + 10*d.cfg.Settle }

// newChores returns the chores in their order, the path from hint to proof: look, heal lost
// tables, examine changed tables. Planting, new nonces and the disk follow.
func (d *Daemon) newChores() []chore {
	return slices.Concat(d.standbyChores(), []chore{
		{"end the pause", func(st *state) time.Time { return st.pause.until }, nil, briefLimit, func(ctx context.Context, st *state) { d.unpause(ctx, st, "The pause has run out") }},
		{"end a drill that is not answered", func(st *state) time.Time { return st.drills.Under.By }, func(st *state) bool { return st.drills.Under != nil }, briefLimit, d.drillTooLong},
		{"go on with a drill", func(st *state) time.Time { return st.drills.Under.GoesOnAt() }, func(st *state) bool { return st.drills.Under != nil }, writeLimit, d.goOnDrill},
		{"drill by schedule", func(st *state) time.Time { return st.drills.At }, func(st *state) bool { return st.drills.Under == nil && st.mayWrite() }, writeLimit, d.drillBySchedule},
		{"judge what the last run left", func(st *state) time.Time { return st.suspicion.retry.At }, func(st *state) bool { return st.suspicion != nil }, readLimit, d.judgeRemains},
		{"look", func(st *state) time.Time { return st.looking.at }, nil, readLimit, d.lookEverywhere},
		{"look at native tables before the heal", d.firstNativeLookAt, nil, readLimit, d.lookNativeFirst},
		{"heal", func(st *state) time.Time { return st.loss.retry.At }, func(st *state) bool { return st.loss != nil }, d.settleLimit(), d.heal},
	}, d.nativeChores(), []chore{
		{"examine", perFamily(func(fs *familyState) time.Time { return fs.examined.dueAt }), nil, readLimit, d.examine},
		{"say what was accepted", func(st *state) time.Time { return st.accepted.At }, nil, briefLimit, d.sayAccepted},
		{"say which policies have become DROP", func(st *state) time.Time { return st.closings.At }, nil, briefLimit, d.sayPolicies},
		{"ask kube-proxy for a full sync", perFamily(func(fs *familyState) time.Time { return fs.proxy.askAt }), (*state).mayWrite, writeLimit, d.askForSyncs},
		{"plant", func(st *state) time.Time { return st.marks.retry.At }, func(st *state) bool { return !st.allPlanted() }, writeLimit, d.plant},
		{"keep connections", d.keepAt, d.mayKeep, briefLimit, d.keep},
		{"follow with the standby", d.followAt, (*state).nothingLost, writeLimit, d.followStandby},
		{"apply the declaration", func(st *state) time.Time { return st.declared.retry.At }, (*state).mayWrite, writeLimit, d.apply},
		{"empty the quarantine", readmitAt, nil, writeLimit, d.readmit},
		{"remove doubled jumps", perFamily(func(fs *familyState) time.Time { return fs.undoubleAt }), (*state).mayWrite, writeLimit, d.undouble},
		{"remove what pods that are gone left", func(st *state) time.Time { return st.pods.RemoveAt }, (*state).mayWrite, writeLimit, d.removeGoneContainers},
		{"renew the marks", perFamily(rotationAt), (*state).nothingLost, writeLimit, d.rotate},
		{"end the contention", func(st *state) time.Time { return st.contention.calmAt }, (*state).nothingLost, briefLimit, func(ctx context.Context, st *state) { st.contention.end(ctx) }},
		{"count unguarded rules", d.inventoryAt, d.mayTakeInventory, readLimit, d.takeInventory},
		{"find owners", d.ownersAt, d.mayFindOwners, briefLimit, d.findOwners},
		{"compare with the baseline", d.compareAt, nil, briefLimit, func(_ context.Context, st *state) { d.compareBaseline(st) }},
		{"save", func(st *state) time.Time { return pace.Earliest(st.disk.markedAt, st.disk.saveAt) }, (*state).maySave, diskLimit, func(ctx context.Context, st *state) { d.save(ctx, st, false) }},
		{"give memory back", func(st *state) time.Time { return st.memory.FreeAt }, nil, briefLimit, d.freeMemory},
	})
}

// dueAt returns when the chore is due; zero: not before another chore has run, or never after a
// cleanup.
func (c chore) dueAt(st *state) time.Time {
	if st.removed || c.may != nil && !c.may(st) {
		return time.Time{}
	}
	return c.at(st)
}

// next returns the first chore that is due, or nil. The loop runs it, and then looks from the
// first chore on again.
func (d *Daemon) next(st *state) *chore {
	now := time.Now()
	chores := d.runnable(st, now)
	for i := range chores {
		if c := &chores[i]; pace.Due(c.dueAt(st), now) {
			return c
		}
	}
	return nil
}

// runnable returns the chores that may run now. While a copy of the standby is written, no chore
// runs that writes. The copy's commit would make its writes stale, or look like a flusher's. The
// first due one ends the list, so that no later chore delays it.
func (d *Daemon) runnable(st *state, now time.Time) []chore {
	if st.copying == nil {
		return d.chores
	}
	for i, c := range d.chores {
		if c.limit >= writeLimit && pace.Due(c.dueAt(st), now) {
			return d.chores[:i]
		}
	}
	return d.chores
}

// wakeAt returns when the next chore is due without a hint: the loop sleeps until then.
func (d *Daemon) wakeAt(st *state) time.Time {
	var at time.Time
	for _, c := range d.runnable(st, time.Now()) {
		at = pace.Earliest(at, c.dueAt(st))
	}
	return at
}

// perFamily returns a function for chore.at that returns the first due time of all families.
func perFamily(at func(*familyState) time.Time) func(*state) time.Time {
	return func(st *state) time.Time {
		var first time.Time
		for _, fs := range st.families {
			first = pace.Earliest(first, at(fs))
		}
		return first
	}
}

// nothingLost reports whether no loss is open. A chore that would write during a loss waits for
// its replay.
func (st *state) nothingLost() bool { return st.loss == nil }

// maySave reports whether no save is under way. Otherwise the next one waits, and has the newest.
func (st *state) maySave() bool { return st.saving == nil }

// mayWrite reports whether canaryd may write rules while nothing is lost.
func (st *state) mayWrite() bool { return st.loss == nil && st.heals() }

// keepAt returns when the keeper's step is due: at once if the basis of its decision has
// changed.
func (d *Daemon) keepAt(st *state) time.Time {
	if st.keptBy != st.keeperBasis() {
		return d.made
	}
	return perFamily(func(fs *familyState) time.Time { return fs.keeper.making.TryAt })(st)
}

// running is the step that the loop executes.
type running struct {
	name  string
	since time.Time
	limit time.Duration
}

// overdue returns an error if the step has taken longer than it may. Alive returns it, so that
// the service manager restarts canaryd.
func (r *running) overdue() error {
	if took := time.Since(r.since); took >= r.limit {
		return fmt.Errorf("canaryd hangs: the step %q has run for %s, and may take %s", r.name, took.Round(time.Second), r.limit)
	}
	return nil
}

// work runs a step. While it runs, Alive judges it by its limit. If it exceeds the limit, the
// log says once that it hangs.
func (d *Daemon) work(ctx context.Context, name string, limit time.Duration, do func()) {
	r := &running{name, time.Now(), limit}
	d.running.Store(r)
	late := time.AfterFunc(limit, func() {
		klog.FromContext(ctx).Error(r.overdue(), "A step hangs; nothing is noticed or put back until canaryd is restarted",
			"step", name, "advice", "the service manager does that; else restart it, and report the goroutines that `kill -QUIT` prints")
	})
	do()
	late.Stop()
	d.beat() // before the step is over for Alive
	d.running.Store(nil)
}

// Alive returns nil if the loop turns, and no step takes longer than its limit. Watchdog and
// health checks restart canaryd otherwise. Losses do not count: a restart in the middle of an
// outage does not help.
func (d *Daemon) Alive() error {
	for _, w := range []*worker{d.copier, d.saver} {
		if r := w.now.Load(); r != nil && r.overdue() != nil {
			return r.overdue()
		}
	}
	if r := d.running.Load(); r != nil {
		return r.overdue()
	}
	idle := time.Since(d.made) - time.Duration(d.turned.Load())
	if limit := 5*d.cfg.PollInterval + 10*time.Second; idle > limit {
		return fmt.Errorf("the loop has not turned for %s", idle.Round(time.Second))
	}
	return nil
}

// freeMemory gives memory back to the kernel, a while after reads and writes.
func (d *Daemon) freeMemory(_ context.Context, st *state) {
	st.memory.Gave(time.Now())
	if d.cfg.FreeMemory != nil {
		d.cfg.FreeMemory()
	}
}
