package reload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// staleReads is how often a family is read because somebody wrote between
// read and restore. A writer that commits more often than
// iptables-save can read would put a replay off for ever; then a loss is
// answered all the same, and counts as raced.
const staleReads = 5

// A run is one job in one session.
type run struct {
	Replayer
	session iptables.Session
	job     Job
	action  action
}

// A turn is one family on its way from the guarded read to the proof.
type familyRun struct {
	family rules.Family
	plans  []tablePlan // in the order in which they are written
	answer iptables.Written
	// sent are the tables of plans that the last write may have written, and
	// landed those that it has.
	sent, written map[rules.TableName]bool
	// staged: what decides is written before what translates.
	staged bool
	// reread: it was read once more after the flusher was done.
	reread bool
	start  time.Time    // when its first read began
	nonce  canary.Nonce // of the marks that the last plan plants
	result FamilyResult
	memory Memory // see Job; its own reads count, too
	// bisected: rules were tried one by one. refused are those to leave out, by
	// their text with the reason.
	bisected bool
	refused  map[rules.TableName]map[string]string
	// skippedTables are tables that were refused as a whole, with the reason: others are
	// written without them. blame is a refusal of which it must be seen yet
	// which table it was for.
	skippedTables map[rules.TableName]error
	tableRefusal  error
	// declined are the refusals for which a strict job leaves tables as they are.
	claimedRefused map[rules.TableName][]Refusal
}

func (t *familyRun) stale() bool { return errors.Is(t.answer.Err, nft.ErrStale) }

// families reads and plans every family, writes all of them by one restore, in
// two stages if that takes long, and proves each by a second read. Those between
// whose read and restore another process wrote have all of it again, and so, without
// them, have those in which rules were found that are refused.
func (r run) families(ctx context.Context) Result {
	result := Result{}
	end := func(t *familyRun) {
		t.result.Took, t.result.Done = time.Since(t.start), time.Now()
		result[t.family] = t.result
		if r.Proved != nil && r.action.writesRules {
			r.Proved(r.job, t.family, t.result)
		}
	}
	marks := r.job.Marks
	var runs []*familyRun
	for _, f := range r.job.Families {
		runs = append(runs, &familyRun{family: f, memory: r.job.Memory})
	}
	for try := 1; len(runs) > 0; try++ {
		for _, t := range runs {
			r.job.Marks = t.withTriedMarks(r.job.Marks)
		}
		planned := r.planFamilies(ctx, runs)
		marks = r.announceMarks(marks, planned)
		for try == 1 && r.settle(ctx, runs, planned) {
			planned = r.planFamilies(ctx, runs)
			marks = r.announceMarks(marks, planned)
		}
		for _, t := range runs {
			if !slices.Contains(planned, t) {
				end(t)
			}
		}
		if r.checkRefuses(planned, end) {
			return result
		}
		var stale []*familyRun
		r.write(ctx, planned, r.session.Restore)
		for _, t := range planned {
			if t.stale() {
				stale = append(stale, t)
			}
		}
		if try >= r.maxReads() {
			if r.mayWriteUnguarded() {
				r.write(ctx, stale, r.session.RestoreAnyway)
			}
			stale = nil
		}
		for _, t := range planned {
			if !slices.Contains(stale, t) && (r.bisect(ctx, t) || r.skipTable(t)) {
				stale = append(stale, t)
			}
			if slices.Contains(stale, t) {
				continue
			}
			if r.prove(ctx, t); r.bisectSilent(ctx, t) {
				stale = append(stale, t)
				continue
			}
			end(t)
		}
		runs = stale
	}
	return result
}

// planTurns plans families and returns those of which something is to be written.
func (r run) planFamilies(ctx context.Context, runs []*familyRun) []*familyRun {
	var planned []*familyRun
	for _, t := range runs {
		if r.plan(ctx, t) {
			planned = append(planned, t)
		}
	}
	r.chooseStages(planned)
	return planned
}

// settle waits until the flusher is done, with everything ready to be written. It
// returns true if another process wrote meanwhile. The wait is no part of what a
// replay takes.
func (r run) settle(ctx context.Context, runs, planned []*familyRun) (again bool) {
	if r.job.Settle == nil {
		return false
	}
	r.session.Prepare(ctx, payloads(planned)...)
	memory := r.job.Memory
	for _, t := range runs {
		memory = memory.withFamily(t.family, t.memory)
	}
	start := time.Now()
	memory, again = r.job.Settle(ctx, memory)
	waited := time.Since(start)
	for _, t := range runs {
		// What could not be read while the flusher was at work can be now.
		again = again || t.result.Outcome == Failed && !t.reread
	}
	for _, t := range runs {
		t.start, t.reread = t.start.Add(waited), true
		if again {
			t.memory = memory
		}
	}
	return again
}

// tried returns the marks with those that the turn's last write may have
// planted. Without them its own canary would be taken for one of saved rules, and
// what the owner wrote since for the past.
func (t *familyRun) withTriedMarks(marks canary.Marks) canary.Marks {
	for _, p := range t.plans {
		if t.sent[p.table] && p.mark.Nonce != "" {
			marks = marks.With(t.family.Table(p.table), marks[t.family.Table(p.table)].Trying(p.mark))
		}
	}
	return marks
}

// keep keeps what is to be reported of the tables that the turn's last write
// brought back, although others have to be written once more.
func (t *familyRun) keepReport(before map[rules.TableName]TableResult) {
	for _, p := range t.plans {
		old, now := before[p.table], t.result.Tables[p.table]
		if p.mark.Nonce == "" || now.Mark.Nonce != p.mark.Nonce || old.Mark.Nonce == p.mark.Nonce || now.Finding.Verdict.Loss() {
			continue
		}
		now.Finding, now.Lost, now.Policies, now.flushed, now.restored = old.Finding, old.Lost, old.Policies, old.flushed, old.restored
		now.Seen = old.Seen
		now.Proved, now.Wrote, now.Skipped, now.Changed = true, len(p.wrote), p.skipped, old.Changed.and(p.change)
		// Without these the rules that were left out would be forgotten, and the node called healthy.
		now.Replayed, now.Quarantined, now.Weakened = p.replay, p.quarantined, p.weakened
		t.result.Tables[p.table] = now
	}
}

// ahead tells which marks the turns are about to plant, beside those of turns
// before, and returns all of them. To keep them takes time, in which somebody may
// write: what was told before is not told again, so that the next try, which plants
// the same marks, is written right after its read.
func (r run) announceMarks(marks canary.Marks, runs []*familyRun) canary.Marks {
	if r.BeforeWrite == nil || len(runs) == 0 {
		return marks
	}
	announced := marks
	for _, t := range runs {
		for _, p := range t.plans {
			if p.mark.Nonce != "" {
				marks = marks.With(t.family.Table(p.table), marks[t.family.Table(p.table)].Trying(p.mark))
			}
		}
	}
	if !reflect.DeepEqual(marks, announced) {
		r.BeforeWrite(marks)
	}
	return marks
}

// plan reads one family under guard, judges its tables and picks what to write.
// It returns false if there is nothing, and then the turn's result says why.
func (r run) plan(ctx context.Context, t *familyRun) bool {
	if t.start.IsZero() {
		t.start = time.Now()
	}
	job := r.job
	job.Memory = t.memory
	tasks, snapshot, err := r.examine(ctx, r.session, t.family, job)
	if err != nil {
		t.result = FamilyResult{Outcome: Failed, Err: err}
		return false
	}
	for _, task := range tasks {
		t.memory = t.memory.With(t.family.Table(task.table), task.finding)
	}
	before := t.result.Tables
	t.result = newResult(tasks)
	t.keepReport(before)
	if r.job.Judged != nil {
		r.job.Judged(t.family, t.result.Tables)
	}
	if r.action.writesRules {
		t.acceptEarlierWrites(tableid.Of(r.job.Memory.unproved, t.family))
	}
	t.result.Seen = snapshot.Digest
	t.result.Digest, t.result.proxyCanary = snapshot.Digest, tablesWith(snapshot, kubeProxyCanary)
	absent := r.supply(ctx, tasks)
	for i := range tasks {
		tasks[i].unavailable = absent
		tasks[i].doubled = r.job.Doubled[t.family.Table(tasks[i].table)]
		tasks[i].unavailable.refused = r.refusals(t, tasks[i])
	}
	if len(t.sent) > 0 || t.nonce == "" { // else nothing was written with it
		t.nonce = canary.NewNonce()
	}
	plans := planAll(tasks, r.action.plan, t.nonce)
	if t.staged {
		sortByStage(plans)
	}
	t.plans = t.withoutSkipped(plans)
	if job.Strict {
		t.reportSkipped()
	}
	t.sent, t.written = nil, nil
	if len(t.plans) == 0 {
		t.result.Outcome = t.outcomeWithoutWrite()
	}
	return len(t.plans) > 0
}

// refusals returns which rules of a table are to be left out as refused, with the
// reasons: those that trials of this turn found and, unless the action is to try
// them again, those that earlier ones did. To find those anew would cost 30 trials
// in the middle of each outage.
func (r run) refusals(t *familyRun, task tableTask) map[string]string {
	if r.action.retriesRefused {
		return t.refused[task.table]
	}
	list := task.quarantined
	if r.job.Strict { // what is declared is tried again: its table waits for it
		list = slices.DeleteFunc(slices.Clone(list), func(h QuarantinedRule) bool { return task.claimed(h.Chain) || task.claimed(h.Rule.Target) })
	}
	all := refusedOf(list)
	maps.Copy(all, t.refused[task.table])
	return all
}

// examine reads one family under guard and judges its tables.
func (r Replayer) examine(ctx context.Context, s iptables.Session, f rules.Family, job Job) ([]tableTask, iptables.Snapshot, error) {
	snapshot, err := s.Read(ctx, f)
	if err != nil {
		return nil, iptables.Snapshot{}, fmt.Errorf("reading %s: %w", f, err)
	}
	examiner := Examiner{Canary: r.Canary, Protection: r.Protection}
	return examiner.tasks(snapshot, job), snapshot, nil
}

func planAll(tasks []tableTask, pick func(tableTask, canary.Nonce) *tablePlan, nonce canary.Nonce) []tablePlan {
	var plans []tablePlan
	for _, task := range tasks {
		if plan := pick(task, nonce); plan != nil {
			plans = append(plans, *plan)
		}
	}
	return plans
}

func newResult(tasks []tableTask) FamilyResult {
	result := FamilyResult{Tables: map[rules.TableName]TableResult{}}
	for _, task := range tasks {
		tr := TableResult{
			Finding: task.finding, Mark: task.want.Mark,
			Section: task.seen.Section, Read: task.seen.Err == nil, Table: task.seen.Table, Seen: task.seen.Table, Absent: task.absent(),
			flushed:  task.finding.MarkLost && len(task.finding.Witnesses) == len(task.want.Mark.Witnessed),
			restored: task.finding.Restored != "",
			last:     task.finding,
		}
		if task.finding.Verdict.Loss() {
			tr.Lost = countLost(task)
			tr.Policies = changedPolicies(task)
		}
		result.Tables[task.table] = tr
	}
	return result
}
