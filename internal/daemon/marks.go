package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// The marks get a new nonce once a changed generation has been quiet for rotateQuiet. On
	// legacy that rewrites the whole table, so it may take no more than 2 % of a core.
	rotateQuiet = 200 * time.Millisecond
	rotateShare = 49
	// If owners are never quiet for so long, the marks are renewed anyway after rotateMost.
	// Until then a file that was saved earlier passes for the present rules.
	rotateMost = 10 * time.Second
	// Next to an owner that never rests a try waits for that owner's commits: at 5,000 services
	// 0.1 s, in which the loop learns nothing. These tries take 0.5 % of the time at most.
	rotateBeaten = 199
	// A purge reads the rules before its first deletion, and canaryd recognises it by the marks
	// that it then deletes. So marks stay for holdQuiet after a single command removed rules,
	// and for culprit.PurgeKept at most while such commands continue.
	holdQuiet = 10 * time.Second
)

// marking is the loop's knowledge of the marks.
type marking struct {
	current canary.Marks // the marks that were planted last
	retry   pace.Retry   // when tables without marks get them
	trouble pace.Trouble // why the last planting failed
	// madeTables are the tables that did not exist before canaryd wrote to them.
	madeTables reload.Tables
}

// rotation has the times at which the marks of one family are renewed.
type rotation struct {
	at time.Time // zero: the marks are as new as the generation
	by time.Time // when they are renewed although owners are not quiet
	// removedSince is when single commands began to remove rules, and removedLast when one did
	// so last.
	removedSince, removedLast time.Time
	released                  bool // the generation grew, too
	// beaten: an owner's commit made the last guarded try stale, and no quiet time came since. Next
	// to a restless owner, the next try is not due before notBefore.
	beaten    bool
	notBefore time.Time
}

// plant writes the first canaries and witnesses. The content that the tables have when these
// are proved is the generation.
func (d *Daemon) plant(ctx context.Context, st *state) {
	families := d.plantable(st)
	if len(families) == 0 {
		st.marks.retry.At = st.suspicion.retry.At
		return
	}
	result, err := d.replayer(ctx, st).Plant(ctx, d.job(st, families...))
	for f, fr := range result {
		d.applyResult(ctx, st, f, fr)
		d.countRefusal(f, fr.Err)
		err = errors.Join(err, fr.Err)
	}
	d.countLocked(st, result, err)
	if err == nil && !st.allPlanted() {
		err = errors.Join(unplanted(st, result), st.suspicion.why())
	}
	if err != nil {
		st.looking.plan(time.Now())
		st.marks.retry.Failed(err, time.Now())
		st.marks.trouble.Report(ctx, err, "Some tables have no canary; canaryd does not notice when they are flushed", "retryIn", st.marks.retry.Wait)
		return
	}
	st.marks.retry.Wait = 0
	st.marks.trouble.Over()
	st.looking.plan(time.Now())
	if st.mode == api.Observe && st.declared.now.Generation != nil {
		st.examineAll(st.looking.at)
	}
	want := st.want()
	count, chains := want.Counts()
	klog.FromContext(ctx).Info("Canaries are planted and the generation is captured",
		"chain", d.cfg.Canary, "generation", want.ID(), "rules", count, "chains", chains)
}

// errNoCanary: a table was read, and got no canary.
var errNoCanary = errors.New("it has no canary yet")

// unplanted says which tables got no canary, and why, for the log of plant; nil if none.
func unplanted(st *state, result reload.Result) error {
	var errs []error
	for id, tr := range flushes.TablesOf(result) {
		if tr.Mark.Nonce == "" && !st.table(id).spared {
			errs = append(errs, fmt.Errorf("%s: %w", id, cmp.Or(tr.Finding.Err, errNoCanary)))
		}
	}
	return errors.Join(errs...)
}

// planted reports whether every table of the family has a mark, or needs none. examineAll
// leaves other families out.
func (st *state) planted(f rules.Family) bool {
	for t, ts := range st.families[f].tables {
		if st.marks.current[f.Table(t)].Nonce == "" && !ts.spared {
			return false
		}
	}
	return true
}

// anyPlanted reports whether a table of the family has a mark, or needs none yet. Looks skip
// other families: a probe would show nothing.
func (st *state) anyPlanted(f rules.Family) bool {
	for t, ts := range st.families[f].tables {
		if st.marks.current[f.Table(t)].Nonce != "" || ts.spared {
			return true
		}
	}
	return false
}

// allPlanted reports whether every table has a mark, or needs none. Until then plant is tried,
// and lists of rules and owners are not complete.
func (st *state) allPlanted() bool {
	for f := range st.families {
		if !st.planted(f) {
			return false
		}
	}
	return true
}

// plan makes a new nonce due once the owners have been quiet.
func (r *rotation) plan(now time.Time) {
	r.at = pace.Latest(now.Add(rotateQuiet), r.at)
	r.by = pace.Earliest(r.by, now.Add(rotateMost))
}

// hold keeps the marks for a while after a single command removed rules: if a purge follows, it
// is recognised by them.
func (r *rotation) hold(now time.Time) {
	if now.Sub(r.removedLast) > holdQuiet {
		r.removedSince = now
	}
	r.removedLast = now
}

// letGo lets the marks be renewed although single commands removed rules.
func (r *rotation) letGo() { r.released = true }

// heldUntil returns until when the marks are to stay, because a purge may be under way. It is
// zero if none may be, or if the generation also grew.
func (r *rotation) heldUntil() time.Time {
	if r.removedSince.IsZero() || r.released {
		return time.Time{}
	}
	return pace.Earliest(r.removedLast.Add(holdQuiet), r.removedSince.Add(culprit.PurgeKept))
}

// putOff delays a pending renewal until that time at least.
func (r *rotation) putOff(until time.Time) {
	r.at, r.by = pace.Latest(r.at, until), pace.Latest(r.by, until)
}

// rotationAt returns when the family's marks may be renewed; zero: not before an examination.
// The renewal waits until nothing has to be examined and no owner is at work. Next to restless
// owners it has a latest time. That is safe, because a renewal reads under guard and does not
// touch lost tables.
func rotationAt(fs *familyState) time.Time {
	if fs.looked.trouble.There() || fs.examined.trouble.There() {
		return time.Time{}
	}
	if anyOf(fs.tables, func(ts *tableState) bool { return ts.learningStopped }) {
		return time.Time{}
	}
	at := fs.rotation.at
	if fs.restless() && !at.IsZero() {
		at = pace.Latest(fs.rotation.by, fs.rotation.notBefore)
	}
	if at.IsZero() {
		return at
	}
	return pace.Latest(at, fs.rotation.heldUntil())
}

// restless reports whether an owner of the family's rules is at work.
func (fs *familyState) restless() bool {
	return !fs.examined.dirty.IsZero() || anyOf(fs.tables, func(ts *tableState) bool { return ts.pending })
}

// rotate renews the nonce of families whose generation changed. So canaryd recognises a file
// that was saved before the change when another process restores it. A try is one guarded write,
// because the loop has more urgent work. If a restless owner commits within it, the marks alone
// guard the next try: the kernel takes that one unless a mark is gone. So no owner's commits
// prevent two tries in a row.
func (d *Daemon) rotate(ctx context.Context, st *state) {
	var families []rules.Family
	byMarks := false
	for f, fs := range st.inOrder() {
		if pace.Due(rotationAt(fs), time.Now()) {
			families = append(families, f)
			byMarks = byMarks || fs.restless() && fs.rotation.beaten
		}
	}
	start, job := time.Now(), d.job(st, families...)
	job.ByMarks = byMarks
	result, err := d.replayer(ctx, st).Rotate(ctx, job)
	cost := time.Since(start)
	for _, f := range families {
		fs := st.families[f]
		fr, ok := result[f]
		fs.rotation = rotation{}
		if byMarks || errors.Is(fr.Err, nft.ErrStale) {
			fs.rotation = rotation{beaten: true, notBefore: time.Now().Add(rotateBeaten * cost)}
		}
		if ok {
			d.applyResult(ctx, st, f, fr)
		}
		if ferr := errors.Join(err, fr.Err); ferr != nil {
			// A flush happened in between, or the lock is held: look, then try again.
			klog.FromContext(ctx).V(1).Info("The marks could not be renewed yet", "family", f, "reason", ferr)
			fs.rotation.putOff(time.Now().Add(max(d.cfg.PollInterval, rotateShare*cost)))
			st.looking.plan(time.Now())
			continue
		}
		if !fs.rotation.at.IsZero() {
			fs.rotation.putOff(time.Now().Add(rotateShare * cost))
		}
	}
}

// addMade notes the tables that canaryd's write made: they did not exist when it was planned. A
// cleanup removes them.
func (st *state) addMade(f rules.Family, fr reload.FamilyResult) {
	for t, tr := range fr.Tables {
		if tr.Seen == nil && !tr.Absent && tr.Proved {
			st.marks.madeTables = st.marks.madeTables.With(f, t)
		}
	}
}
