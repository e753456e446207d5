package daemon

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
)

// An openRecord is the flush record of a loss that lasts. One flush has one record, also if it
// takes iptables' tables and native tables. Both losses then hold it, and the last loss to end
// closes it.
type openRecord struct {
	record  api.Flush
	noticed time.Time
	// until is when the flusher was quiet. A loss that began later is of another flush. Zero: the
	// wait for the flusher lasts.
	until   time.Time
	resumed bool  // an earlier run has opened it
	counted bool  // metrics have it
	asked   bool  // an operator requested a restore
	ended   ended // the losses of it that have ended
	// diff is the lost content, and lost the native part of it that is not compared yet. unkept:
	// the journal does not have all of it.
	diff   []api.TableDiff
	lost   []flushes.LostTable
	fresh  []flushes.LostTable // of lost, not compared with the baseline yet
	room   flushes.Room        // how much more diff may hold
	unkept bool
	kept   bool // the journal has it as an open record
}

// An answer is the answer of canaryd to a loss of one kind of table: the tries to put it back.
type answer struct {
	*openRecord
	logged   bool // the log has that the loss was noticed
	attempts int  // tries that failed
	retry    pace.Retry
	trouble  pace.Trouble // why it lasts, for the log
	failed   error        // the last try's; nil: it did not fail
}

// newAnswer returns the answer to a loss that was noticed now, with a record of its own. record
// has the time of the loss.
func newAnswer(record api.Flush, now time.Time) answer {
	return answer{openRecord: &openRecord{record: record, noticed: now, room: flushes.DiffRoom()}, retry: pace.Retry{At: now}}
}

// answerTo returns the answer to a loss that was noticed now. record has the time of the loss. If
// the same flush has an open record of the other kind of table, the loss becomes a part of that
// record.
func (st *state) answerTo(record api.Flush, now time.Time) answer {
	for _, a := range st.answers() {
		if st.mode == api.Heal && !st.drilling(now) && a.takes(pace.Earliest(record.Time, record.LastInForce)) {
			a.begin(record)
			return answer{openRecord: a.openRecord, retry: pace.Retry{At: now}}
		}
	}
	return newAnswer(record, now)
}

// drilling reports whether a drill may have caused a loss that is noticed now. The record of a
// drill has no part of a flush.
func (st *state) drilling(now time.Time) bool {
	return st.drills.Under != nil || st.drills.DoubtAt(now) != nil
}

// takes reports whether a loss that began then belongs to the flush of the record. It does while
// the flusher is not quiet, and until a loss of the record has ended. A record that an operator's
// request may open has no ID yet.
func (o *openRecord) takes(begin time.Time) bool {
	return o.record.ID != "" && o.record.Drill == "" && !o.resumed && o.ended.outcome == "" && (o.until.IsZero() || !begin.After(o.until))
}

// begin makes the record begin with another loss of the same flush, if that began earlier, and
// notes how exact that is.
func (o *openRecord) begin(of api.Flush) {
	r := &o.record
	if earlier := r.Time.Sub(of.Time); earlier > 0 {
		r.Time = of.Time
		r.Standby = r.Standby.Later(earlier)
		r.NoticedSeconds = o.noticed.Sub(r.Time).Seconds()
	}
	if bound := of.LastInForce; !bound.IsZero() && bound.Before(r.Time) { // else the record's time is earlier
		r.LastInForce, r.Stalled = pace.Earliest(r.LastInForce, bound), r.Stalled || of.Stalled
	}
}

// quiet notes that the flusher is quiet now: a loss that begins later is of another flush.
func (o *openRecord) quiet() {
	if o.until.IsZero() {
		o.until = time.Now()
	}
}

// known reports whether the record has lost rules: a read has shown them.
func (o *openRecord) known() bool { return len(o.record.Lost.Tables)+len(o.record.Native) > 0 }

// dropSuspects removes the culprits that were only suspected, before the first loss is added to
// the record.
func (o *openRecord) dropSuspects() {
	if !o.known() {
		o.record.Culprits, o.record.CulpritsMissed, o.record.CulpritsLikely = nil, false, false
	}
}

// addDiff adds the lost content of iptables' tables.
func (o *openRecord) addDiff(diff ...api.TableDiff) {
	o.diff, o.unkept = append(o.diff, diff...), o.unkept || len(diff) > 0
}

// addLost adds a native table. Its lost content takes time to find, and so waits until the journal
// needs it, mostly after the replay.
func (o *openRecord) addLost(t flushes.LostTable) {
	o.lost, o.fresh, o.unkept = append(o.lost, t), append(o.fresh, t), true
}

// compare adds the lost native rules that the baseline lacks to the record. It waits until the
// journal needs the record, as addLost does.
func (o *openRecord) compare(b *baseline.Known) {
	b.AddNative(&o.record, o.fresh)
	o.fresh = nil
}

// takeUnkept returns the lost content for a write to the journal; nil if that has it already.
func (o *openRecord) takeUnkept() []api.TableDiff {
	if !o.unkept {
		return nil
	}
	o.diff = append(o.diff, flushes.NativeDiff(o.lost, &o.room)...)
	o.lost, o.unkept = nil, false
	return o.diff
}

// answers returns the answers to the open losses of all kinds of table.
func (st *state) answers() (list []*answer) {
	if st.loss != nil {
		list = append(list, &st.loss.answer)
	}
	if st.native.loss != nil {
		list = append(list, &st.native.loss.answer)
	}
	return list
}

// holder returns the open loss that holds the record besides one; nil: there is none.
func (st *state) holder(o *openRecord, besides *answer) *answer {
	for _, a := range st.answers() {
		if a.openRecord == o && a != besides {
			return a
		}
	}
	return nil
}

// openRecords returns the open records, each once.
func (st *state) openRecords() (list []*openRecord) {
	for _, a := range st.answers() {
		if !slices.Contains(list, a.openRecord) {
			list = append(list, a.openRecord)
		}
	}
	return list
}

const (
	flushNoticed  = "Rules are being flushed"
	drillNoticed  = "A canary is gone: the drill took it"
	drillTook     = "A drill took the canary, and no rule"
	awaitDecision = "Rules were lost and are not put back unasked; their owner has to write them again, or a decision is needed"
	lossAccepted  = "An operator has accepted that these rules are lost"
)

// logNotice logs once that a loss of these tables was noticed, before the wait for the flusher: the
// log shows a flush while it happens.
func (a *answer) logNotice(log klog.Logger, says, tables, next string) {
	a.logged = true
	when := []any{"noticedAfter", a.noticed.Sub(a.record.Time).Round(10 * time.Microsecond)}
	if since := a.record.LastInForce; a.record.Stalled {
		when = []any{"noticedAfterAtMost", a.noticed.Sub(since).Round(10 * time.Microsecond)}
	}
	if a.resumed {
		says = "Rules that were lost before canaryd was restarted may still be missing"
		when = []any{"since", a.record.Time.UTC().Format(time.RFC3339)}
	}
	log.Info(says, append([]any{"flush", a.record.ID, "tables", tables}, append(when, "next", next)...)...)
}

// logLost logs the losses of tables that were added to the record.
func (o *openRecord) logLost(log klog.Logger, says, tables string, lost api.Lost) {
	log.Info(says, "flush", o.record.ID, "tables", tables, "rules", lost.Rules, "chains", lost.Chains, "jumps", lost.Jumps,
		"elements", lost.Elements, "by", flushes.CulpritsText(o.record))
}

// logNothing logs that the rules' owners were faster than canaryd: the loss gets no record.
func (o *openRecord) logNothing(log klog.Logger) {
	log = severity.Notices(log)
	if o.record.Standby != nil {
		log = log.WithValues("standby", o.record.Standby.Text())
	}
	log.Info("canaryd read the tables again and found nothing missing", "flush", o.record.ID)
}

// fail notes why a try failed, and plans the next. err may be nil: then only the outcome shows
// the failure.
func (a *answer) fail(err error) {
	a.attempts++
	a.failed = err
	a.retry.Failed(err, time.Now())
	a.record.Outcome = reload.Failed
	if err != nil {
		a.record.Detail = err.Error()
	}
}

// logRetry logs why a loss of these tables lasts, and the advice. known: a read has shown the
// loss. err may be nil: a try failed without an error. An error that lasts is logged once in a
// while, and each try with -v=2.
func (a *answer) logRetry(log klog.Logger, err error, known bool, tables string) {
	says := "Rules are still missing"
	if !known {
		says = "Rules may be missing"
	}
	if err != nil && !a.trouble.MetAgain(err, time.Now()) {
		log = log.V(2) // not a line for each try
	}
	if log.Enabled() {
		log.Error(err, says, "flush", a.record.ID, "tables", tables, "attempt", a.attempts, "retryIn", a.retry.Wait,
			"missingFor", time.Since(a.record.Time).Round(time.Millisecond), "advice", failureOf(err).advice)
	}
}

// An ended is the end of a recorded loss, or of several losses of one record.
type ended struct {
	tables   []string // for the log
	outcome  api.Outcome
	detail   string
	back     time.Time // when the last table was back
	atMost   bool      // a loss was back some time before that
	attempts int
	written  time.Time // when the last write ended; zero: there was none
	kernel   time.Duration
}

// with returns the end of both losses.
func (e ended) with(o ended) ended {
	if o.written.After(e.written) {
		e.written, e.kernel = o.written, o.kernel
	}
	e.tables, e.outcome = append(e.tables, o.tables...), worstOf(e.outcome, o.outcome)
	e.detail = strings.Join(slices.DeleteFunc([]string{e.detail, o.detail}, func(s string) bool { return s == "" }), "\n")
	e.atMost = e.atMost || o.outcome == reload.Skipped
	e.back, e.attempts = pace.Latest(e.back, o.back), max(e.attempts, o.attempts)
	return e
}

// endLoss ends a loss that st no longer has. The last loss of a record closes the record: endLoss
// keeps it, counts the absence, and logs that the rules are back. e is nil for a loss that no read
// has shown; log is for lines about a flush of these tables.
func (d *Daemon) endLoss(ctx context.Context, st *state, log klog.Logger, a *answer, e *ended) {
	o := a.openRecord
	if e != nil {
		o.ended = o.ended.with(*e)
	}
	if other := st.holder(o, a); other != nil {
		if o.record.Outcome == reload.Failed && other.failed == nil { // only the ended loss had failed
			o.record.Outcome, o.record.Detail = api.Pending, ""
			if st.pause.on() {
				o.record.Outcome = api.WaitingPaused
			}
		}
		if other.attempts > 0 { // else it may end in a moment, and be counted in another record
			d.keepOpen(ctx, st, o)
		}
		return
	}
	if o.ended.outcome == "" {
		if a.logged {
			o.logNothing(log)
		}
		return
	}
	if o.ended.outcome == api.WaitingObserve && st.observedSince.IsZero() { // the owner was faster than the other loss
		o.ended.outcome, o.ended.back = reload.Skipped, time.Now()
	}
	o.close()
	if o.record.Outcome == api.WaitingObserve || o.record.Outcome == api.Interrupted { // the rules are not back
		d.journal(ctx, st, o)
		return
	}
	absent := flushes.EndAbsence(&o.record, o.ended.back)
	o.record.AbsentAtMost = o.record.AbsentAtMost || o.ended.atMost
	if o.counted {
		d.cfg.Metrics.ObserveRecovery(absent, o.record.Standby)
	}
	d.journal(ctx, st, o)
	flushes.LogBack(log, strings.Join(o.ended.tables, ", "), o.record, o.asked, o.ended.attempts)
}

// interrupt closes all records of flushes that wait for a replay, their owner or a decision. After
// a cleanup canaryd answers none of them, nor those of the last run.
func (d *Daemon) interrupt(ctx context.Context, st *state) {
	for _, o := range st.openRecords() {
		if o.record.Outcome = api.Interrupted; o.known() {
			d.journal(ctx, st, o)
		}
	}
	for _, r := range st.native.waitingRecords() {
		r.Outcome = api.Interrupted
		d.keepRecord(ctx, st, r, true, func() { d.write(ctx, r, nil) })
	}
	if w := st.decision; w != nil {
		w.record.Outcome = api.Interrupted
		st.journal.Rewrite(w.record)
		d.write(ctx, w.record, nil)
	}
	for i := range st.journal {
		if r := &st.journal[i]; r.Outcome == api.WaitingObserve && !r.Earlier {
			r.Outcome = api.Interrupted
			d.write(ctx, *r, nil)
		}
	}
	for _, r := range st.unanswered {
		r.Outcome = api.Interrupted
		d.write(ctx, r, nil)
	}
	st.loss, st.native.loss, st.native.waiting, st.decision = nil, nil, nil, nil
	st.unanswered, st.observedSince = nil, time.Time{}
}

// close puts the end of all losses into the record.
func (o *openRecord) close() {
	r, e := &o.record, o.ended
	r.Outcome, r.Detail = e.outcome, e.detail
	if written := e.written.Sub(r.Time).Seconds(); !e.written.IsZero() && written > r.WrittenSeconds {
		r.WrittenSeconds, r.KernelSeconds = written, e.kernel.Seconds()
	}
}

// outcomes are the ends of a loss, from the best to the worst.
var outcomes = []api.Outcome{"", reload.Skipped, api.Interrupted, reload.Proved, api.Drilled, reload.Raced, reload.Partial, reload.Failed, api.WaitingObserve}

// worstOf returns the worst of these outcomes: a record has that of its worst loss.
func worstOf(list ...api.Outcome) api.Outcome {
	return slices.MaxFunc(list, func(a, b api.Outcome) int { return cmp.Compare(slices.Index(outcomes, a), slices.Index(outcomes, b)) })
}
