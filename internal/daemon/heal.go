package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A replay that failed is tried again for as long as the loss lasts, after
// 100 ms at first and every 30 s at last. For the lock it is always 100 ms: it
// comes free at any moment, while a rule that the kernel refuses stays refused.
const (
	firstTry = 100 * time.Millisecond
	lastTry  = 30 * time.Second
)

// heal answers a loss: it waits until the flusher is done, replays what is
// lost, and proves it. In observe mode and in a pause it only tells.
func (d *Daemon) heal(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	if st.heals() && d.limited(ctx, st) {
		return
	}
	used := d.cpu()
	settle := d.settle(ctx, st)
	switch {
	case st.mode == api.Observe:
		d.observe(ctx, st)
		return
	case st.pause.on():
		d.hold(ctx, st)
		return
	}
	st.loss.jumpsDeleted = d.anyFamily(st, func(fs *familyState) bool { return fs.examined.quiet })
	st.loss.gone = d.gonePods(ctx, st)
	job := d.job(st, d.cfg.Kernel.Families()...)
	job.Generation = protect.DetachAll(job.Generation, st.loss.gone)
	job.Settle = settle
	result, err := d.replayer(ctx, st).Heal(ctx, job)
	if result != nil { // else the lock was not had, and nothing was done
		d.spend(st, used)
	}
	d.concludeHeal(ctx, st, result, err)
}

// protection returns what is protected: what is learned, and the chains that are claimed.
func (d *Daemon) protection(st *state) rules.Protection {
	p := d.cfg.Protection
	if claims, learned := st.declared.claims, p.Chain; claims != nil {
		p.Chain = func(chain string) bool { return claims(chain) || learned(chain) }
	}
	return p
}

func (d *Daemon) examiner(st *state) reload.Examiner {
	return reload.Examiner{Canary: d.cfg.Canary, Protection: d.protection(st)}
}

func (d *Daemon) replayer(ctx context.Context, st *state) reload.Replayer {
	return reload.Replayer{
		Kernel: d.cfg.Kernel, Canary: d.cfg.Canary, Protection: d.protection(st),
		Supplier: d.supplier(), BeforeWrite: d.beforeWrite(ctx, st),
		Proved: func(job reload.Job, f rules.Family, result reload.FamilyResult) {
			d.sweepAfter(job.Generation, f, result, st.families[f].known.natIntact)
		},
	}
}

// supplier returns what has ipsets and nfacct objects, nil if nothing does.
func (d *Daemon) supplier() reload.Supplier {
	if d.cfg.Sets == nil {
		return nil // and not an interface that holds nil
	}
	return d.cfg.Sets
}

// stopGrace is what a replay under way gets when the daemon is told to stop:
// one family back and the other gone would be the worst of ends. systemd kills
// after 90 s, Kubernetes after 30 s.
const stopGrace = 20 * time.Second

// finishing returns a context that outlives ctx by stopGrace.
func finishing(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-time.After(stopGrace):
			cancel()
		case <-longer.Done():
		}
	})
	return longer, func() { stop(); cancel() }
}

// concludeHeal takes a replay's result into the state and ends or prolongs
// the loss.
func (d *Daemon) concludeHeal(ctx context.Context, st *state, result reload.Result, err error) {
	st.loss.record.Attempts++
	d.tell(ctx, st, hits(result))
	st.pods.addGone(&st.loss.record, st.loss.gone)
	st.pods.noteReturned(result, time.Now())
	st.loss.recovery.note(st.loss.hit, result)
	st.loss.memory = st.loss.memory.After(result)
	st.pace = st.pace.After(result)
	unread := d.lostButUnread(st, result)
	done := err == nil && unread == nil
	err = errors.Join(err, unread)
	for _, f := range rules.Families() {
		fr, ok := result[f]
		if !ok {
			continue
		}
		d.applyResult(st, f, fr)
		st.families[f].proxy.pendingSync.owe(fr, time.Now())
		if fr.Owed && fr.ProxyStands() {
			st.families[f].nudged(time.Now())
		}
		d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
		d.countRefusal(f, fr.Err)
		done = done && (fr.Outcome.Done() || fr.DoneExceptQuarantined())
		err = errors.Join(err, fr.Err)
	}
	d.countLocked(st, result, err)
	if !done {
		d.retry(ctx, st, err)
		if beaten(result) {
			// Nothing was refused: whoever undid it may be done by now, and if
			// not, the limit holds.
			st.loss.retryIn(firstTry)
		}
		return
	}
	d.recovered(ctx, st, result)
}

// lostButUnread returns why a table whose canary is lost could not be judged:
// the loss stays open until it can be.
func (d *Daemon) lostButUnread(st *state, result reload.Result) error {
	var errs []error
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if tr.Finding.Verdict == canary.Unknown && st.families[f].tables[t].verdict.Loss() {
				errs = append(errs, lostUnread(f, t, tr.Finding))
			}
		}
	}
	return errors.Join(errs...)
}

func lostUnread(f rules.Family, t rules.TableName, finding canary.Finding) error {
	return fmt.Errorf("%s %s lost its canary and cannot be read: %w", f, t, finding.Err)
}

// hits returns what a replay found lost under guard.
func hits(result reload.Result) map[rules.TableID]hit {
	found := map[rules.TableID]hit{}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			found[f.Table(t)] = hit{verdict: tr.Finding.Verdict, lost: tr.Lost, policies: tr.Policies, finding: tr.Finding, seen: fr.Seen, table: tr.Seen}
		}
	}
	return found
}

// applyResult takes what a write and its proof showed of one family into the state.
func (d *Daemon) applyResult(st *state, f rules.Family, fr reload.FamilyResult) {
	fs := st.families[f]
	now := time.Now()
	st.memory.scheduleFree(now)
	fs.proxy.pendingSync.saw(fr.ProxyStands(), now)
	if fr.ProxyKnown() {
		fs.proxy.saw(fr.ProxyStands(), now)
	}
	st.noteMade(f, fr)
	missing := map[rules.TableName]int{}
	for _, t := range protect.Tables() {
		tr, ok := fr.Tables[t]
		if !ok {
			continue
		}
		if tr.Read {
			missing[t] = len(tr.Finding.Jumps) + len(tr.Finding.Waiting)
		}
		st.marks.current = st.marks.current.With(f.Table(t), tr.Mark)
		ts := fs.tables[t]
		ts.spared = tr.Absent && tr.Mark.Nonce == "" && d.spares(st, f, t)
		if tr.Finding.Verdict != canary.Unknown || !ts.verdict.Loss() {
			ts.verdict = tr.Finding.Verdict
		}
		if tr.Proved {
			ts.notePlaced(tr.Placed, now)
		}
		if tr.Gone != nil && !st.generation.learned.Knows(f, t) {
			d.learn(st, f, t, *tr.Gone, canary.Finding{Verdict: canary.Intact}, now)
			fs.examined.plan(now)
			continue
		}
		if tr.Proved && tr.Replayed {
			d.holdBack(st, f, t, tr.Quarantined)
		}
		if tr.Proved {
			ts.verdict, ts.learningStopped, missing[t] = canary.Intact, false, 0
			d.cfg.Metrics.SetCanaryPresent(f, t, true)
		}
		// Beside a foreign write the finding is of one read and the section of
		// another: a jump that was deleted in between has its grace, which the
		// examination that follows gives it. So has what is missing while the
		// generation stays as it is while its learning is stopped: it was flushed.
		judged := fr.Digest != 0 && (!ts.learningStopped || tr.Proved) || !st.generation.learned.Knows(f, t)
		if tr.Read && judged && !ts.verdict.Loss() && ts.verdict != canary.Unknown {
			d.learn(st, f, t, tr.Section, tr.Finding, now)
		}
		if tr.Read {
			ts.noteStanding(tr.Table, fr.Digest)
		}
	}
	if fr.Digest != 0 {
		fs.examined.digest, fs.examined.at, fs.looked.unseen = fr.Digest, now, time.Time{}
		fs.noteKnown(now)
		fs.noteSound(fr.Digest, missing)
	} else {
		fs.examined.markDirty(now)
	}
	d.cfg.Metrics.SetJumpsMissing(f, missing)
	d.examineAfter(st, f, fr, now)
	if st.decision.waitsIn(f) { // what was read is not compared with what waits
		fs.examined.plan(now)
	}
	fs.examined.quiet = false
	st.disk.marksChanged(now)
}

// examineAfter plans an examination of what the reads around a write were the
// first to show: a look that finds the digest of such a read takes it for
// examined. A jump that was deleted by name waits for its grace, and what a
// renewal found lost under standing marks has nobody yet who replays it.
func (d *Daemon) examineAfter(st *state, f rules.Family, fr reload.FamilyResult, now time.Time) {
	fs := st.families[f]
	for t, tr := range fr.Tables {
		ts := fs.tables[t]
		if len(tr.Finding.Waiting) > 0 && !ts.learningStopped {
			fs.examined.plan(fs.examined.moved.Add(d.cfg.JumpGrace))
		}
		if st.loss == nil && ts.verdict.Loss() && !ts.learningStopped {
			fs.examined.plan(now)
		}
	}
}

func (d *Daemon) countRefusal(f rules.Family, err error) {
	var refused *iptables.RestoreError
	switch {
	case errors.As(err, &refused):
		d.cfg.Metrics.ObserveRestoreFailure(f, refused.Reason)
	case errors.Is(err, iptables.ErrLocked):
		d.cfg.Metrics.ObserveRestoreFailure(f, iptables.ReasonLock)
	}
}

// countLocked counts a session that could not begin because somebody holds the
// lock: then no family has a result of its own.
func (d *Daemon) countLocked(st *state, result reload.Result, err error) {
	if result != nil || !lockReason(err) {
		return
	}
	for f := range st.families {
		d.cfg.Metrics.ObserveRestoreFailure(f, iptables.ReasonLock)
	}
}

// beaten reports whether a replay failed because somebody else wrote in the
// middle of it.
func beaten(result reload.Result) bool {
	for _, fr := range result {
		if fr.Beaten() {
			return true
		}
	}
	return false
}

// longer returns the pause that follows one of wait: twice as long, between
// firstTry and lastTry.
func longer(wait time.Duration) time.Duration { return min(max(2*wait, firstTry), lastTry) }

// retry plans the next try and says why there is one.
func (d *Daemon) retry(ctx context.Context, st *state, err error) {
	l := st.loss
	l.attempts++
	l.retryIn(longer(l.wait))
	if lockReason(err) {
		// It was waited for already, and is let go of at any moment.
		l.retryIn(firstTry)
	}
	l.record.Outcome = reload.Failed
	if err != nil {
		l.record.Detail = err.Error()
	}
	d.keepOpen(ctx, l)
	d.logRetry(ctx, st, err)
}

// retryIn plans the next try.
func (l *loss) retryIn(wait time.Duration) { l.wait, l.tryAt = wait, time.Now().Add(wait) }

// recovered ends the loss: everything is proved to be in force.
func (d *Daemon) recovered(ctx context.Context, st *state, result reload.Result) {
	l := st.loss
	st.loss = nil
	st.looking.afterReplay(time.Now())
	d.noteHealed(ctx, st, l)
	st.letGoAfter(result, l.gone, time.Now())
	if !l.recorded {
		st.flushLog(ctx).Info("Nothing was lost any more when it was looked at under guard", "flush", l.record.ID)
		return
	}
	l.record.Outcome = l.recovery.outcome(result)
	l.record.Detail = ""
	for _, fr := range result {
		if fr.Err != nil { // rules that had to be left out
			l.record.Detail = fr.Err.Error()
			st.flushLog(ctx).Error(fr.Err, "Not all of the rules could be put back", "flush", l.record.ID)
		}
	}
	d.logHeld(ctx, result)
	absent := back(&l.record, l.recovery.provedAt())
	for _, fr := range result {
		if written := fr.Written.Sub(l.record.Time).Seconds(); !fr.Written.IsZero() && written > l.record.WrittenSeconds {
			l.record.WrittenSeconds, l.record.KernelSeconds = written, fr.Kernel.Seconds()
		}
	}
	if l.counted {
		d.cfg.Metrics.ObserveRecovery(absent)
	}
	d.journal(ctx, st, l)
	d.logRecovery(ctx, st, l, result)
}

// worst returns the outcome that the flush record gets: that of the family
// that went least well.
func worst(result reload.Result) api.Outcome {
	outcome := reload.Skipped
	for _, o := range []api.Outcome{reload.Proved, reload.Raced, reload.Partial, reload.Failed} {
		for _, fr := range result {
			if fr.Outcome == o {
				outcome = o
			}
		}
	}
	return outcome
}

// lockReason tells the lock from other reasons for which nothing was written.
func lockReason(err error) bool { return errors.Is(err, iptables.ErrLocked) }
