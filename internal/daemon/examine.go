package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// examined is what full reads showed of one family.
type examined struct {
	digest    uint64    // of what was examined last
	at        time.Time // when that was; zero: never
	sound     uint64    // digest of the last read that showed everything in force
	dirty     time.Time // since when something is unexamined; zero: nothing is
	dueAt     time.Time // of the next examination, not before this; zero: none is due
	readEnd   time.Time
	pause     time.Duration // between readEnd and the next read
	notBefore time.Time     // after a read that failed: no other one before this
	trouble   trouble       // why the last read failed
	moved     time.Time     // when something protected changed last
	quiet     bool          // the last examination found the jump grace over
}

// plan asks for an examination at that time, or before.
func (x *examined) plan(at time.Time) { x.dueAt = earliest(x.dueAt, at) }

// markDirty plans an examination of what moved.
func (x *examined) markDirty(now time.Time) {
	if x.dirty.IsZero() {
		x.dirty = now
	}
	at := earliest(now.Add(captureQuiet), x.dirty.Add(captureMost))
	x.dueAt = latest(latest(at, x.readEnd.Add(x.pause)), x.notBefore)
}

// examine reads the families in which something moved, judges them, and
// learns what their owners decided.
func (d *Daemon) examine(ctx context.Context, st *state) {
	for _, f := range rules.Families() {
		if fs := st.families[f]; fs != nil && due(fs.examined.dueAt, time.Now()) {
			d.examineFamily(ctx, st, f, fs)
		}
	}
	d.resumeLearning(ctx, st)
}

func (d *Daemon) examineFamily(ctx context.Context, st *state, f rules.Family, fs *familyState) {
	start, used := time.Now(), d.cpu()
	fs.examined.dueAt = time.Time{}
	snapshot, err := d.cfg.Kernel.Read(ctx, f)
	fs.examined.readEnd = time.Now()
	took := fs.examined.readEnd.Sub(start)
	fs.examined.pause = d.readPause(took, used)
	st.memory.scheduleFree(fs.examined.readEnd)
	if err != nil {
		fs.unseeable()
		if fs.lacks() {
			d.lost(st, f, fs.examined.digest)
		}
		if fs.examined.trouble.met(err, fs.examined.readEnd) {
			klog.FromContext(ctx).Error(err, "The tables could not be read; whether rules were lost is unknown until they can", "family", f)
		}
		// By what the read cost, and not by how long it lasted: after canaryd was suspended for 30 s
		// in the middle of one, nine times as long would be spent in the dark.
		fs.examined.notBefore = fs.examined.readEnd.Add(max(d.cfg.PollInterval, fs.examined.pause))
		fs.examined.dueAt = fs.examined.notBefore
		return
	}
	if fs.examined.trouble.there() {
		fs.examined.notBefore = time.Time{}
	}
	if fs.examined.trouble.over() {
		if st.loss != nil && st.heals() { // perhaps it lasts only because of this
			st.loss.tryAt = earliest(st.loss.tryAt, fs.examined.readEnd)
		}
		klog.FromContext(ctx).Info("The tables can be read again", "family", f)
	}
	fs.examined.digest, fs.examined.at, fs.examined.dirty = snapshot.Digest, start, time.Time{}
	d.noteOwner(ctx, st, snapshot)
	st.noteReturn(snapshot)
	d.noteDecision(ctx, st, snapshot)
	fs.proxy.pendingSync.saw(reload.ProxyStands(snapshot), fs.examined.readEnd)
	found := d.judge(st, f, snapshot, start)
	st.pods.disbelieve(found[rules.Nat].Section, found[rules.Nat].Finding, start)
	d.heedProxy(ctx, st, f, snapshot, found, fs.examined.readEnd)
	missing := map[rules.TableName]int{}
	for _, t := range protect.Tables() {
		x, ts := found[t], fs.tables[t]
		missing[t] = len(x.Finding.Jumps) + len(x.Finding.Waiting)
		st.marks.current = st.marks.current.With(f.Table(t), x.Mark)
		ts.spared = x.Absent && x.Mark.Nonce == "" && d.spares(st, f, t)
		switch {
		case ts.learningStopped && !x.Finding.MarkLost:
			v := x.Finding.Verdict
			ts.learningStopped = v.Loss() || v == canary.Unknown || !canary.Covers(st.want()[f.Table(t)], snapshot.Tables[t])
			if ts.learningStopped {
				continue
			}
			ts.verdict = canary.Intact
		case x.Finding.Verdict == canary.Unknown && ts.verdict.Loss():
			// It stays lost until somebody sees otherwise.
		default:
			ts.verdict = x.Finding.Verdict
		}
		switch {
		case ts.verdict.Loss():
			if x.Finding.Verdict == canary.Unknown {
				d.logUnreadable(ctx, f, t, ts, x.Finding.Err)
			} else {
				ts.trouble.over()
			}
			d.noteDrift(ctx, st, x.Finding)
			d.lost(st, f, snapshot.Digest)
		case ts.verdict == canary.Unknown:
			// No error: it can be read, and could not be when the canaries were
			// planted. That is tried again, and told, by itself.
			if x.Finding.Err != nil {
				d.logUnreadable(ctx, f, t, ts, x.Finding.Err)
			}
			// What was in the way may go without a write that is noticed.
			fs.examined.plan(fs.examined.readEnd.Add(quietWalk))
		default:
			ts.trouble.over()
			d.learn(st, f, t, x.Section, x.Finding, start)
			ts.noteStanding(x.Table, x.Seen)
		}
		if len(x.Finding.Waiting) > 0 {
			fs.examined.plan(fs.examined.moved.Add(d.cfg.JumpGrace))
		}
		for _, h := range x.Finding.Waiting {
			if at := st.generation.learned.Shrunk(f, t, h.Chain).Add(d.cfg.JumpGrace); at.After(start) {
				fs.examined.plan(at)
			}
		}
	}
	if st.loss != nil {
		st.loss.find(f, found)
	}
	if fs.lacks() && lastUnknown(fs) {
		// The marks may tell more of a table than a read that failed, if they were not
		// looked at since the loss: a heal without that would close its record too soon.
		st.looking.plan(start)
	}
	fs.noteKnown(start)
	fs.noteSound(snapshot.Digest, missing)
	d.cfg.Metrics.SetJumpsMissing(f, missing)
}

// noteSound notes the digest of a read that showed nothing lost or missing.
func (fs *familyState) noteSound(digest uint64, missing map[rules.TableName]int) {
	for _, n := range missing {
		if n > 0 {
			return
		}
	}
	if lastResult(fs) == metrics.ProbeIntact {
		fs.examined.sound = digest
	}
}

// lastUnknown reports whether a table of the family could not be read.
func lastUnknown(fs *familyState) bool {
	for _, ts := range fs.tables {
		if ts.verdict == canary.Unknown {
			return true
		}
	}
	return false
}

// readPause returns how long no read follows one that took so long and began
// when that much processor time was used. What it cost counts: beside a busy
// writer, or on a busy machine, most of the time that a read takes is waiting.
func (d *Daemon) readPause(took, used time.Duration) time.Duration {
	if d.cfg.CPU == nil {
		return readShare * took
	}
	return max(took, readShare*(d.cpu()-used))
}

// judge examines a snapshot. Jumps that were deleted by name are judged as
// lost only if this very read shows that nothing has moved for the grace.
func (d *Daemon) judge(st *state, f rules.Family, snapshot iptables.Snapshot, now time.Time) map[rules.TableName]reload.Examined {
	fs := st.families[f]
	fs.examined.quiet = false
	found := d.examiner(st).Examine(snapshot, d.job(st, f))
	d.noteMoves(fs, found, now)
	for _, x := range found {
		if len(x.Finding.Waiting) > 0 && now.Sub(fs.examined.moved) >= d.cfg.JumpGrace {
			fs.examined.quiet = true
		}
	}
	if fs.examined.quiet {
		found = d.examiner(st).Examine(snapshot, d.job(st, f))
	}
	return found
}

// noteMoves remembers when something protected in the family changed last.
func (d *Daemon) noteMoves(fs *familyState, found map[rules.TableName]reload.Examined, now time.Time) {
	for t, x := range found {
		ts := fs.tables[t]
		if x.Finding.Verdict == canary.Unknown {
			continue
		}
		fs.examined.moved = movedAt(fs.examined.moved, ts, x.Section, now)
		ts.seen, ts.known = x.Section, true
	}
}

func movedAt(last time.Time, ts *tableState, seen rules.Section, now time.Time) time.Time {
	if ts.known && !ts.seen.Equal(seen) {
		return now
	}
	return last
}

// learn takes one table's section into the generation and plans what follows:
// another examination while something shrunk waits, and a new nonce.
func (d *Daemon) learn(st *state, f rules.Family, t rules.TableName, seen rules.Section, finding canary.Finding, now time.Time) {
	fs, ts := st.families[f], st.families[f].tables[t]
	fs.examined.moved = movedAt(fs.examined.moved, ts, seen, now)
	ts.seen, ts.known = seen, true
	seen = d.supplement(st, f, t, seen)
	_, seen = seen.Split(st.declared.claims) // what is declared is not learned
	before := st.generation.learned.Generation[f.Table(t)]
	seen = d.withoutDoubles(fs, ts, before, seen, now)
	first := !st.generation.learned.Knows(f, t)
	next, again := st.generation.learned.Learn(f, t, seen, finding, now)
	st.generation.learned = next
	ts.pending = !again.IsZero() || len(finding.Waiting) > 0
	if ts.pending {
		ts.verdict = canary.Changed
		fs.examined.plan(again)
	} else {
		ts.verdict = canary.Intact
	}
	if first || !before.Equal(next.Generation[f.Table(t)]) {
		if st.generation.made = reload.MadeByOwners; first {
			st.generation.made = reload.MadeAtStart
		}
		st.generation.change(now)
		st.planSave(now)
		if !first {
			fs.rotation.plan(now)
		}
	}
}

// resumeLearning ends what observe mode only watches, once every table is learned again.
func (d *Daemon) resumeLearning(ctx context.Context, st *state) {
	d.resumeLearningAs(ctx, st, reload.Skipped, "The owners have put their rules back")
}

// resumeLearningAs does that with this outcome, and this line in the log.
func (d *Daemon) resumeLearningAs(ctx context.Context, st *state, outcome api.Outcome, what string) {
	if st.observing.since.IsZero() {
		return
	}
	for _, fs := range st.families {
		for _, ts := range fs.tables {
			if ts.learningStopped {
				return
			}
		}
	}
	now := time.Now()
	absent, lost := now.Sub(st.observing.since), false
	for i := range st.journal {
		if r := &st.journal[i]; r.Outcome == api.WaitingObserve && !r.Earlier {
			absent, lost = max(absent, back(r, now)), lost || r.Lost.Rules > 0
			r.Outcome = outcome
			d.write(ctx, *r, nil)
		}
	}
	if lost {
		d.cfg.Metrics.ObserveRecovery(absent)
	}
	st.observing.since = time.Time{}
	klog.FromContext(ctx).Info(what, "absent", absent.Round(time.Millisecond))
}
