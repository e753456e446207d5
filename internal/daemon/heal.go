package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// heal answers a loss: it waits until the flusher is done, replays the lost rules, and proves
// them. In observe mode and in a pause it only records the loss; see observe and recordPaused.
func (d *Daemon) heal(ctx context.Context, st *state) {
	ctx, done := finishing(ctx)
	defer done()
	if st.heals() && st.contention.limited(ctx, &st.loss.retry, true, func() api.Flush { return d.blamedNow(ctx, st) }) {
		st.loss.quiet() // a later flush of native tables is another one
		return
	}
	used := d.cpu()
	var settle func(context.Context, reload.Memory) (reload.Memory, bool)
	if !st.pause.on() || !st.loss.shown() { // else nothing hurries, and a read shows who is done
		settle = d.settle(ctx, st)
	}
	switch {
	case st.mode == api.Observe:
		d.observe(ctx, st)
		return
	case st.pause.on() && !d.recordPaused(ctx, st):
		return
	}
	d.noticePurge(ctx, st)
	st.loss.jumpsDeleted = d.anyGraceOver(st, time.Now())
	st.loss.gone = d.gonePods(ctx, st)
	job := d.job(st, d.cfg.Kernel.Families()...)
	job.Generation = protect.DetachAll(job.Generation, st.loss.gone)
	job.Latest = d.latest(st)
	job.Settle = settle
	if st.pause.on() { // marks may be written, and rules may not
		job.Judged = func(_ rules.Family, tables map[rules.TableName]reload.TableResult) error {
			if anyOf(tables, func(tr reload.TableResult) bool { return tr.Lost.Any() }) {
				return errFlushed
			}
			return nil
		}
	}
	more := false
	job.Interrupted = func() bool {
		more = more || d.lostMore(ctx, st)
		return more
	}
	ride := &nativeRide{used: used}
	job.Rider = func() *iptables.Rider { return d.rider(ctx, st, ride) }
	result, err := d.replayer(ctx, st).Heal(ctx, job)
	if st.pause.on() && anyOf(result, func(fr reload.FamilyResult) bool { return errors.Is(fr.Err, errFlushed) }) {
		for f, fr := range result {
			d.applyResult(ctx, st, f, fr)
		}
		st.loss.retry.Failed(nil, time.Now()) // the next try records the new loss
		return
	}
	if result != nil && !onlyDrilled(result) { // nil: the lock was not free, and nothing was done
		d.spend(&st.contention, used)
	}
	d.concludeHeal(ctx, st, ride, result, err)
	if more && st.loss != nil {
		st.loss.retry.In(0, time.Now())
	}
}

// protection returns the configured protection, with the chains that declared sources claim. It
// decides which rules a read or a replay takes for guarded.
func (d *Daemon) protection(st *state) rules.Protection {
	p := d.cfg.Protection
	if claims, learned := st.declared.now.Claims, p.Chain; claims != nil {
		p.Chain = func(chain string) bool { return claims(chain) || learned(chain) }
	}
	return p
}

// examiner returns the Examiner that judges reads now.
func (d *Daemon) examiner(st *state) reload.Examiner {
	return reload.Examiner{Canary: d.cfg.Canary, Protection: d.protection(st), Extracted: st.extracted}
}

// replayer returns the Replayer for the present state. All writes of iptables' rules use it: it
// saves new marks before, and sweeps after a proof.
func (d *Daemon) replayer(ctx context.Context, st *state) reload.Replayer {
	r := reload.Replayer{
		Kernel: d.cfg.Kernel, Canary: d.cfg.Canary, Protection: d.protection(st), BeforeWrite: d.beforeWrite(ctx, st),
		Proved: func(job reload.Job, f rules.Family, result reload.FamilyResult) {
			d.sweepAfter(job.Generation, f, result, st.families[f].known.natIntact)
		},
	}
	if d.cfg.Sets != nil { // an interface that holds nil is not nil
		r.Supplier = d.cfg.Sets
	}
	return r
}

// stopGrace is how long a replay may take after the daemon has to stop. A stop with one family
// back and the other lost would be worst. systemd kills after 90 s, Kubernetes after 30 s.
const stopGrace = 20 * time.Second

// finishing returns a context that outlives ctx by stopGrace, for a write that must not stop
// halfway. The function frees it.
func finishing(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(stopGrace, cancel) })
	return longer, func() { stop(); cancel() }
}

// concludeHeal takes a replay's result into the state. It ends the loss, or plans another try.
func (d *Daemon) concludeHeal(ctx context.Context, st *state, ride *nativeRide, result reload.Result, err error) {
	st.loss.record.Attempts++
	d.recordLosses(ctx, st, hits(result))
	d.concludeRide(ctx, st, ride)
	st.pods.AddPods(&st.loss.record, st.loss.gone, true)
	st.pods.SetReturned(result, time.Now())
	st.loss.recovery.afterTry(st.loss.hit, result)
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
		d.applyResult(ctx, st, f, fr)
		st.families[f].proxyAfterReplay(fr, time.Now())
		if st.loss.record.Drill != api.DrillCanary || !fr.Outcome.Done() { // a drill that works is counted apart
			d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
		}
		d.countRefusal(f, fr.Err)
		done = done && (fr.Outcome.Done() || fr.DoneExceptQuarantined())
		err = errors.Join(err, fr.Err)
	}
	d.countLocked(st, result, err)
	d.shutStandby(ctx, st)
	purged := d.noticePurge(ctx, st)
	st.loss.failed = nil
	if !done {
		d.healFailed(ctx, st, err)
		if anyOf(result, reload.FamilyResult.Beaten) {
			// Nothing was refused, but another process wrote during the replay. It may be done
			// by now; if it is not, replays are limited.
			st.loss.retry.In(pace.FirstTry, time.Now())
		}
		return
	}
	if purged {
		st.loss.retry.In(0, time.Now())
		return
	}
	if st.purges.GoesOn(st.loss.record.Time, time.Now()) {
		st.loss.retry.In(culprit.PurgeTry, time.Now())
		d.keepOpen(ctx, st, st.loss.openRecord)
		return
	}
	d.readNativeToo(ctx, st)
	ended := st.loss
	d.recovered(ctx, st, result)
	d.drillAnswered(ctx, st, ended)
}

// lostButUnread returns why tables whose canary is lost could not be judged: the loss stays
// open until they can be.
func (d *Daemon) lostButUnread(st *state, result reload.Result) error {
	var errs []error
	for id, tr := range flushes.TablesOf(result) {
		errs = append(errs, st.lostUnread(id, tr.Finding))
	}
	return errors.Join(errs...)
}

// lostUnread returns why a lost table could not be judged; nil if it could, or is not lost.
// Such an error keeps the loss open.
func (st *state) lostUnread(id rules.TableID, finding canary.Finding) error {
	if finding.Verdict != canary.Unknown || !st.table(id).verdict.Loss() {
		return nil
	}
	return fmt.Errorf("%s lost its canary and cannot be read: %w", id, finding.Err)
}

// hits returns the losses that a replay found under guard, for the flush record. Tables without
// a loss are among them.
func hits(result reload.Result) map[rules.TableID]flushes.Hit {
	found := map[rules.TableID]flushes.Hit{}
	for id, tr := range flushes.TablesOf(result) {
		found[id] = flushes.Hit{Verdict: tr.Finding.Verdict, Lost: tr.Lost, Policies: tr.Policies, Finding: tr.Finding, Seen: result[id.Family].Seen, Table: tr.Seen}
	}
	return found
}

// countRefusal counts a family's refused write in metrics, by its reason. Other errors and nil
// count nothing.
func (d *Daemon) countRefusal(f rules.Family, err error) {
	var refused *iptables.RestoreError
	switch {
	case errors.As(err, &refused):
		d.cfg.Metrics.ObserveRestoreFailure(f, refused.Reason)
	case errors.Is(err, iptables.ErrLocked):
		d.cfg.Metrics.ObserveRestoreFailure(f, iptables.ReasonLock)
	}
}

// countLocked counts a session that could not begin because another process holds the lock.
// No family has a result of its own then.
func (d *Daemon) countLocked(st *state, result reload.Result, err error) {
	if result != nil || !pace.LockReason(err) {
		return
	}
	for f := range st.families {
		d.cfg.Metrics.ObserveRestoreFailure(f, iptables.ReasonLock)
	}
}

// healFailed plans the next try and logs why there is one. err may be nil: then only the
// outcome shows the failure.
func (d *Daemon) healFailed(ctx context.Context, st *state, err error) {
	l := st.loss
	if l.fail(err); pace.LockReason(err) {
		d.seekLockHolder(st)
	}
	d.showUnread(st)
	d.keepOpen(ctx, st, l.openRecord)
	tables := l.hit
	if !l.shown() {
		tables = st.losses()
	}
	l.logRetry(st.flushLog(ctx), err, l.shown(), tables.Text())
}

// recovered ends the loss: everything is proved to be in force. It plans the looks that follow a
// replay.
func (d *Daemon) recovered(ctx context.Context, st *state, result reload.Result) {
	l := st.loss
	st.loss = nil
	st.purges.BackIs(l.hit, time.Now())
	st.looking.afterReplay(time.Now())
	if l.record.Drill == "" {
		st.contention.countReplay(ctx, l.record, l.jumpsDeleted, d.cfg.JumpGrace)
	}
	st.forgetLeftOut(result, l.gone, time.Now())
	if !l.shown() {
		d.backUnread(ctx, st, l)
		return
	}
	end := ended{tables: []string{l.hit.Text()}, outcome: l.recovery.outcome(result), back: l.recovery.provedAt(), attempts: l.attempts + 1}
	earlier := false // all that the tables lack was in quarantine before
	switch lacks := st.quarantine.Lacks(l.record.ID); {
	case lacks && end.outcome.Done(): // an earlier try of the same loss put it there
		end.outcome = reload.Partial
	case !lacks && end.outcome == reload.Partial:
		earlier, end.outcome = true, reload.Proved
	}
	if l.record.Drill == api.DrillCanary && end.outcome.Done() {
		end.outcome = api.Drilled
	} else if end.outcome.Done() && l.ownersWrote() {
		end.outcome = reload.Skipped
	}
	for _, fr := range result {
		if fr.Err != nil && !earlier { // rules that had to be left out
			end.detail = fr.Err.Error()
			st.flushLog(ctx).Error(fr.Err, "Not all of the rules could be put back", "flush", l.record.ID)
		}
		if fr.Written.After(end.written) {
			end.written, end.kernel = fr.Written, fr.Kernel
		}
	}
	d.logWeakened(ctx, result)
	d.endLoss(ctx, st, st.flushLog(ctx), &l.answer, &end)
	d.logDetours(ctx, st, l, result)
}

// worst returns the outcome for the flush record or a reply: the worst of all families, skipped
// if there is none.
func worst(result reload.Result) api.Outcome {
	all := []api.Outcome{reload.Skipped}
	for _, fr := range result {
		all = append(all, fr.Outcome)
	}
	return worstOf(all...)
}
