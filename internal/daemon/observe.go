package daemon

import (
	"context"
	"errors"
	"maps"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// observe records the loss and stops learning until the owner has put the rules back. It plants
// the lost marks again, so that the next flush is noticed, too. One guarded read shows the lost
// rules and the missing marks: the next look finds later flushes.
func (d *Daemon) observe(ctx context.Context, st *state) {
	before := st.stoppedTables()
	job := d.job(st, d.cfg.Kernel.Families()...)
	job.Latest = d.latest(st)
	// The state file gets the new marks before they are planted, and must keep the lost marks.
	job.Judged = func(f rules.Family, tables map[rules.TableName]reload.TableResult) error {
		for t, tr := range tables {
			d.take(st, tableFinding{id: f.Table(t), source: watching, finding: tr.Finding})
		}
		return nil
	}
	result, err := d.replayer(ctx, st).Replant(ctx, job)
	if result == nil { // on legacy another process may hold the lock for long
		d.observeUnguarded(ctx, st, err)
		return
	}
	d.recordLosses(ctx, st, observed(before, hits(result)))
	st.loss.memory = st.loss.memory.AfterPlanting(result)
	err = errors.Join(err, d.lostButUnread(st, result))
	for f, fr := range result {
		for t, tr := range fr.Tables {
			st.marks.current = st.marks.current.With(f.Table(t), tr.Mark)
		}
		err = errors.Join(err, fr.Err)
		st.families[f].examined.dueAt = time.Now().Add(captureQuiet)
	}
	st.memory.ScheduleFree(time.Now())
	st.disk.marksChanged(time.Now())
	if err != nil {
		d.healFailed(ctx, st, err)
		return
	}
	l := st.loss
	st.loss = nil
	if l.shown() {
		st.observedSince = pace.Earliest(st.observedSince, l.record.Time)
		d.endLoss(ctx, st, st.flushLog(ctx), &l.answer, &ended{outcome: api.WaitingObserve})
		return
	}
	d.backUnread(ctx, st, l)
}

// observeUnguarded records the loss if no marks can be planted, because of err.
func (d *Daemon) observeUnguarded(ctx context.Context, st *state, err error) {
	before := st.stoppedTables()
	found, unread := d.readLoss(ctx, st)
	for id, h := range found {
		d.take(st, tableFinding{id: id, source: watching, finding: h.Finding})
	}
	d.recordLosses(ctx, st, observed(before, found))
	d.healFailed(ctx, st, errors.Join(err, unread))
}

// stoppedTables returns the tables whose learning is stopped, so that observed finds the new
// losses after a read.
func (st *state) stoppedTables() map[rules.TableID]bool {
	learningStopped := map[rules.TableID]bool{}
	for id, ts := range st.tables() {
		learningStopped[id] = ts.learningStopped
	}
	return learningStopped
}

// observed returns the new losses among the losses that reads found, for the record. A table
// whose learning was stopped (before) is lost once more only if its marks are.
func observed(before map[rules.TableID]bool, found map[rules.TableID]flushes.Hit) map[rules.TableID]flushes.Hit {
	maps.DeleteFunc(found, func(id rules.TableID, h flushes.Hit) bool {
		again := h.Finding.MarkLost || len(h.Finding.Witnesses) > 0
		return !h.Verdict.Loss() || before[id] && !again
	})
	return found
}

// readLoss reads every family without guard, because nothing is to be written: in a pause, or
// if observe mode cannot plant. It returns intact tables, too. The error names the parts that
// could not be read or judged.
func (d *Daemon) readLoss(ctx context.Context, st *state) (map[rules.TableID]flushes.Hit, error) {
	st.memory.ScheduleFree(time.Now())
	start, used := time.Now(), d.cpu()
	found := map[rules.TableID]flushes.Hit{}
	var unread []error
	st.loss.seen = map[rules.Family]uint64{}
	for f := range st.inOrder() {
		snapshot, err := d.read(ctx, st, f)
		if err != nil {
			unread = append(unread, err)
			continue
		}
		st.loss.seen[f] = snapshot.Digest
		examined := d.examiner(st).Examine(snapshot, d.job(st, f))
		st.loss.remember(f, examined)
		for t, x := range examined {
			id := f.Table(t)
			found[id] = flushes.HitOf(x)
			unread = append(unread, st.lostUnread(id, x.Finding))
		}
	}
	end := time.Now()
	st.loss.again = end.Add(d.readPause(end.Sub(start), used))
	return found, errors.Join(unread...)
}

// resumeLearning ends the open records of observe mode once every table is learned again, with
// this outcome. Examinations and restores call it; asked: an operator requested a restore.
func (d *Daemon) resumeLearning(ctx context.Context, st *state, outcome api.Outcome, asked bool) {
	if st.observedSince.IsZero() || st.anyFamily((*familyState).learningStopped) {
		return
	}
	now := time.Now()
	absent, lost := now.Sub(st.observedSince), false
	for i := range st.journal {
		if r := &st.journal[i]; r.Outcome == api.WaitingObserve && !r.Earlier {
			r.Outcome = outcome
			absent, lost = max(absent, flushes.EndAbsence(r, now)), lost || r.Lost.Rules > 0
			d.write(ctx, *r, nil)
			flushes.LogBack(klog.FromContext(ctx), strings.Join(append([]string{flushes.Recorded(*r).Text()}, r.NativeNames()...), ", "), *r, asked, r.Attempts)
		}
	}
	if lost {
		d.cfg.Metrics.ObserveRecovery(absent, nil)
	}
	st.observedSince = time.Time{}
}
