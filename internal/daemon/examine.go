package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// examined holds the results of full reads of one family.
type examined struct {
	digest    uint64    // of the read that was examined last
	at        time.Time // when that was; zero: never
	sound     uint64    // digest of the last read that showed everything in force
	dirty     time.Time // since when something is unexamined; zero: nothing is
	since     time.Time // the earliest time of the changes that the last read was the first to show
	dueAt     time.Time // of the next examination, not before this; zero: none is due
	readEnd   time.Time
	pause     time.Duration // between readEnd and the next read
	notBefore time.Time     // after a read that failed: no other one before this
	wait      time.Duration // after the last read that failed; 0: the last one did not
	trouble   pace.Trouble  // why the last read failed
	moved     time.Time     // when something protected changed last
}

// plan makes an examination due at that time, or before.
func (x *examined) plan(at time.Time) { x.dueAt = pace.Earliest(x.dueAt, at) }

// markDirty plans an examination after a change that a probe showed, or that another process
// made during a write of canaryd's.
func (fs *familyState) markDirty(now time.Time) {
	x := &fs.examined
	if x.dirty.IsZero() {
		x.dirty = now
	}
	at := pace.Earliest(now.Add(captureQuiet), x.dirty.Add(captureMost))
	if fs.looked.stamp.Exact {
		at = x.dirty.Add(captureSoon)
	}
	x.dueAt = pace.Latest(pace.Latest(at, x.readEnd.Add(x.pause)), x.notBefore)
}

// examine reads the families that may have changed, judges them, and learns their owners'
// decisions. After the last lost rules of observe mode are back, learning resumes.
func (d *Daemon) examine(ctx context.Context, st *state) {
	for f, fs := range st.inOrder() {
		if pace.Due(fs.examined.dueAt, time.Now()) {
			d.examineFamily(ctx, st, f, fs)
		}
	}
	d.resumeLearning(ctx, st, reload.Skipped, false)
}

// examineFamily reads one family and takes the result into the state: decisions, marks, losses,
// and the owners' changes.
func (d *Daemon) examineFamily(ctx context.Context, st *state, f rules.Family, fs *familyState) {
	start, used := time.Now(), d.cpu()
	snapshot, err := d.read(ctx, st, f)
	x := &fs.examined
	x.dueAt, x.readEnd = time.Time{}, time.Now()
	x.pause = d.readPause(x.readEnd.Sub(start), used)
	st.memory.ScheduleFree(x.readEnd)
	if err != nil {
		d.examinationFailed(ctx, st, f, err)
		return
	}
	x.notBefore, x.wait = time.Time{}, 0
	if x.trouble.Over() {
		if st.loss != nil && st.heals() { // this may be all that kept it open
			st.loss.retry.At = pace.Earliest(st.loss.retry.At, x.readEnd)
		}
		severity.Notices(klog.FromContext(ctx)).Info(tablesRead, "tables", f)
	}
	x.since = pace.Earliest(start, x.dirty)
	x.digest, x.at, x.dirty = snapshot.Digest, start, time.Time{}
	d.yieldToOwner(ctx, st, snapshot)
	st.quarantine.Saw(snapshot, time.Now())
	d.judgeDecision(ctx, st, snapshot)
	d.recallLate(st)
	found := d.judge(ctx, st, f, snapshot, start)
	st.pods.Disbelieve(found[rules.Nat].Section, found[rules.Nat].Finding, start)
	d.judgeProxy(ctx, st, f, snapshot, found, x.readEnd)
	for _, t := range protect.Tables() {
		d.takeExamined(ctx, st, f.Table(t), found[t], start)
		fs.tables[t].setSettled(culprit.Read{Digest: snapshot.Digest, At: start})
	}
	d.lookAtUnguarded(st, f, reload.OnDemandOf(snapshot), x.readEnd)
	if st.loss != nil {
		st.loss.remember(f, found)
	}
	if fs.lacks() && fs.unknown() {
		// If no look followed the loss yet, the marks may show more losses than the failed
		// read. A heal without that look would close its record too soon.
		st.looking.plan(start)
	}
	fs.setKnown(start)
	fs.setSound(snapshot.Digest)
	x.pause = max(x.pause, captureShare*(d.cpu()-used))
}

// examinationFailed plans another examination of a family that could not be read, unless the
// end of the run interrupted the read. Meanwhile its tables are unknown, and known losses stay
// open.
func (d *Daemon) examinationFailed(ctx context.Context, st *state, f rules.Family, err error) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	fs := st.families[f]
	x := &fs.examined
	fs.setUnknown()
	if fs.lacks() {
		st.openLoss(f, x.digest)
	}
	x.trouble.Report(ctx, err, tablesUnread, "tables", f)
	// An owner that removes its chains may make one read fail, and a flush may follow at once.
	x.wait = min(max(2*x.wait, pace.FirstTry), d.cfg.PollInterval)
	// The pause depends on the CPU time of the read, not on its duration. If canaryd was
	// suspended for 30 s during a read, it would otherwise not read for nine times as long.
	x.notBefore = x.readEnd.Add(max(x.wait, x.pause))
	x.dueAt = x.notBefore
}

// takeExamined takes the examination of one table, of a read at start, into the state: it opens
// a loss, or learns. It plans the steps that follow.
func (d *Daemon) takeExamined(ctx context.Context, st *state, id rules.TableID, x reload.Examined, start time.Time) {
	fs, ts := st.families[id.Family], st.table(id)
	if !d.take(st, tableFinding{id: id, source: readInFull, finding: x.Finding, mark: x.Mark, absent: x.Absent, table: x.Table, section: x.Section, read: true}) {
		return
	}
	// An unknown table without an error can be read, and could not be when canaryd planted the
	// canaries. plant plants its canary again, and logs that.
	if x.Finding.Verdict != canary.Unknown || x.Finding.Err != nil {
		ts.trouble.Report(ctx, x.Finding.Err, "A table could not be examined; canaryd does not know whether it lost rules", "family", id.Family, "table", id.Name)
	}
	switch {
	case ts.verdict.Loss():
		d.countDrift(ctx, st, x.Finding)
		d.openLossNow(st, id.Family, x.Seen, 0)
		d.countFromDeletion(st, id, x.Finding)
	case ts.verdict == canary.Unknown:
		// The obstacle may vanish without a write that canaryd notices.
		fs.examined.plan(fs.examined.readEnd.Add(quietWalk))
	default:
		d.learn(ctx, st, id, x.Section, x.Finding, start)
		ts.setStanding(x.Table, x.Seen)
		if protect.OnDemand(id.Name) && x.Mark.Nonce != "" && st.want()[id].Bare() && x.Section.Bare() && fs.rotation.at.IsZero() {
			fs.rotation.plan(start) // the table needs its marks no more
		}
	}
	d.planGraces(st, id, x.Finding)
	if _, due := st.pods.KeptFor(id.Family); id.Name == rules.Nat && due.After(start) {
		fs.examined.plan(due)
	}
}

// readPause returns how long no read follows a read that lasted took and began at the CPU time
// used. Its CPU time counts, because on a busy machine, or next to a busy writer, a read mostly
// waits.
func (d *Daemon) readPause(took, used time.Duration) time.Duration {
	if d.cfg.CPU == nil {
		return readShare * took
	}
	return max(took, readShare*(d.cpu()-used))
}

// judge examines a snapshot of an examination, and returns the results by table. A rule that
// was deleted by name is lost only if this very read lacks it, and its grace is over.
func (d *Daemon) judge(ctx context.Context, st *state, f rules.Family, snapshot iptables.Snapshot, now time.Time) map[rules.TableName]reload.Examined {
	fs, job := st.families[f], d.job(st, f)
	job.Over = nil
	found := d.examiner(st).Examine(snapshot, job)
	for t, x := range found {
		if x.Finding.Verdict != canary.Unknown {
			fs.setSection(t, x.Section, now)
			d.followMissing(ctx, st, f.Table(t), x, now)
		}
	}
	robbed := d.followRobberies(ctx, st, f, found[rules.Nat].Section, found[rules.Nat].Finding, now)
	if robbed || d.anyGraceOver(st, now) {
		found = d.examiner(st).Examine(snapshot, d.job(st, f))
	}
	return found
}
