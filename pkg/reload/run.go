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

// staleReads is how often a family is read because another process wrote between read and
// restore. A process that commits faster than iptables-save reads could delay a replay for ever.
// After this many reads canaryd writes without a guard, and the replay counts as raced.
const staleReads = 5

// A run is one job in one session.
type run struct {
	Replayer
	session iptables.Session
	job     Job
	action  action
}

// A familyRun is one family of a run, from the guarded read to the proof.
type familyRun struct {
	family rules.Family
	plans  []tablePlan // in the order in which they are written
	answer iptables.Written
	// sent has the tables that the last write may have changed, written the tables that it
	// changed.
	sent, written map[rules.TableName]bool
	// staged: filter and mangle are written before nat.
	staged bool
	// reread: the family was read again after the flusher was quiet.
	reread bool
	start  time.Time    // when its first read began
	nonce  canary.Nonce // of the marks that the last plan plants
	result FamilyResult
	memory Memory // see Job; it includes this run's reads
	// refused has the rules to leave out, as trials found them; nil until this run has tried
	// rules.
	refused map[rules.TableName]reasons
	// named has the rules to leave out because the kernel named them in a refusal. namedCount is
	// how often it named a rule. asText has the tables that iptables-restore writes, each with
	// the rule that the kernel refused.
	named      map[rules.TableName]placedReasons
	namedCount int
	asText     map[rules.TableName]*blamed
	// misread has the rules to leave out because this run wrote another rule from their text.
	// earlier has the results of the writes that showed this.
	misread map[rules.TableName]reasons
	// otherSet is how often this run wrote a rule that the kernel took with another ipset.
	otherSet map[rules.TableName]map[rules.Key]int
	earlier  map[rules.TableName]TableResult
	// skipped has the tables that this run no longer writes, with the reason. tableRefusal is a
	// refusal of one table; the next read shows which table.
	skipped      map[rules.TableName]skippedTable
	tableRefusal error
	// misfits has the tables that the last plan leaves alone, with the reason: iptables' rules have
	// no effect in some built-in chain of theirs.
	misfits map[rules.TableName]error
	// seen has the tables as the last guarded read showed them. sets has the ipsets that the
	// plans count on.
	seen map[rules.TableName]*rules.Table
	sets []string
	// overtaken: the last write was refused, and another process had written meanwhile. discarded
	// is how many trials counted for nothing because of such a write.
	overtaken bool
	discarded int
	// textOnly: no rule can be written by its bytes in this run.
	textOnly bool
}

func newFamilyRun(f rules.Family, m Memory) *familyRun {
	return &familyRun{family: f, memory: m, skipped: map[rules.TableName]skippedTable{}}
}

// stale reports whether the kernel refused the write because another process wrote after the read.
func (t *familyRun) stale() bool { return errors.Is(t.answer.Err, nft.ErrStale) }

// families reads and plans every family, writes all of them by one restore, and proves each by
// a second read. each calls it. A long replay is written in two stages. A family is tried again
// if another process wrote before the end of the restore, or if a trial found rules to leave
// out.
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
		runs = append(runs, newFamilyRun(f, r.job.Memory))
	}
	settled := false
	for try := 1; len(runs) > 0; try++ {
		for _, t := range runs {
			r.job.Marks = t.withTriedMarks(r.job.Marks)
		}
		planned := r.planFamilies(ctx, runs)
		marks = r.announceMarks(marks, planned)
		for !settled && r.settle(ctx, runs, planned) {
			planned = r.planFamilies(ctx, runs)
			marks = r.announceMarks(marks, planned)
		}
		settled = true
		for _, t := range runs {
			if !slices.Contains(planned, t) {
				end(t)
			}
		}
		if r.checkRefuses(planned, end) {
			return result
		}
		again, read := r.writeFamilies(ctx, planned, try), try
		for _, t := range acceptedFirst(planned) {
			if slices.Contains(again, t) {
				continue
			}
			if r.leaveNamed(ctx, t) {
				if again = append(again, t); t.namedIn().Family == t.family {
					read = try - 1 // no other process wrote
				}
				continue
			}
			overtaken := r.overtaken(ctx, t)
			if overtaken && try < r.maxReads() || !overtaken && (r.bisect(ctx, t) || r.leaveInContext(t) || r.leaveBytes(t) || r.skipTable(t)) {
				again = append(again, t)
				continue
			}
			if r.prove(ctx, t); r.bisectSilent(ctx, t) {
				again = append(again, t)
				continue
			}
			end(t)
		}
		runs, try = again, read
	}
	return result
}

// writeFamilies writes families, and returns the stale ones that may be read again. After
// maxReads it returns none, and writes stale families without a guard if the action allows it.
func (r run) writeFamilies(ctx context.Context, planned []*familyRun, try int) (stale []*familyRun) {
	if r.job.Rider != nil && len(planned) > 0 {
		if rider := r.job.Rider(); rider != nil {
			r.session.Carry(rider)
		}
	}
	r.write(ctx, planned, r.session.Restore)
	for _, t := range planned {
		if t.stale() {
			stale = append(stale, t)
		}
	}
	if try < r.maxReads() {
		return stale
	}
	if r.mayWriteUnguarded() {
		r.write(ctx, stale, r.session.RestoreAnyway)
	}
	return nil
}

// planFamilies plans families, and returns the families to which something is to be written.
// The caller ends the others: their result is complete.
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

// settle waits until the flusher is quiet, with everything ready to be written. It returns true if
// the families have to be planned again. The wait does not count as time of the replay.
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
		// A family that could not be read while the flusher was at work may be readable now.
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

// withTriedMarks adds the marks that the last write may have planted. Without them, canaryd would
// think that its own new canary belongs to saved rules, and delete the rules that the owner wrote
// since.
func (t *familyRun) withTriedMarks(marks canary.Marks) canary.Marks {
	for _, p := range t.plans {
		if t.sent[p.table] && p.want.Mark.Nonce != "" {
			marks = marks.With(t.family.Table(p.table), marks[t.family.Table(p.table)].Trying(p.want.Mark))
		}
	}
	return marks
}

// keepReport keeps the results of tables that an earlier write of this run put back, while
// other tables are written again. before has the results of all tables until now. Otherwise
// canaryd would forget the quarantined rules, and the flush record would lack the lost rules.
func (t *familyRun) keepReport(before map[rules.TableName]TableResult) {
	for table, old := range before {
		now := t.result.Tables[table]
		if now.Mark.Nonce == "" || now.Finding.Verdict.Loss() {
			continue
		}
		i := slices.IndexFunc(t.plans, func(p tablePlan) bool { return p.table == table })
		switch landed := i >= 0 && t.plans[i].want.Mark.Nonce == now.Mark.Nonce; {
		case landed && old.Mark.Nonce != now.Mark.Nonce: // by the last write
			old = t.plans[i].account(old)
			old.Proved, old.Unproved = true, false
		case !old.Proved || old.Mark.Nonce != now.Mark.Nonce:
			continue
		}
		t.result.Tables[table] = old.reread(now)
	}
}

// announceMarks passes the marks that the families are about to plant to BeforeWrite, and returns
// all marks. While the marks are saved, another process may write. The next try plants the same
// marks, so it is not announced again and is written right after its read.
func (r run) announceMarks(marks canary.Marks, runs []*familyRun) canary.Marks {
	if r.BeforeWrite == nil || len(runs) == 0 {
		return marks
	}
	announced := marks
	for _, t := range runs {
		for _, p := range t.plans {
			if p.want.Mark.Nonce != "" {
				marks = marks.With(t.family.Table(p.table), marks[t.family.Table(p.table)].Trying(p.want.Mark))
			}
		}
	}
	if !reflect.DeepEqual(marks, announced) {
		r.BeforeWrite(marks)
	}
	return marks
}

// plan reads one family under guard, judges its tables and plans the write. It returns false if
// there is nothing to write; the result says why. planFamilies calls it before each try, and
// preview.
func (r run) plan(ctx context.Context, t *familyRun) bool {
	if t.start.IsZero() {
		t.start = time.Now()
	}
	job := r.job
	job.Memory, job.Quarantine = t.memory, t.quarantine(job.Quarantine)
	tasks, snapshot, err := r.examine(ctx, r.session, t.family, job)
	if err != nil {
		t.result = FamilyResult{Outcome: Failed, Err: err}
		return false
	}
	t.seen = map[rules.TableName]*rules.Table{}
	for _, task := range tasks {
		t.memory = t.memory.With(t.family.Table(task.table), task.finding)
		t.seen[task.table] = task.seen.Table
	}
	before := t.result.Tables
	t.result = newResult(tasks)
	t.keepReport(before)
	for table, earlier := range t.earlier {
		t.result.Tables[table] = t.result.Tables[table].after(earlier)
	}
	if r.action.writesRules {
		t.acceptEarlierWrites(tableid.Of(r.job.Memory.unproved, t.family))
	}
	t.result.Seen = snapshot.Digest
	t.result.Digest, t.result.proxyCanary = snapshot.Digest, tablesWithProxy(snapshot)
	t.result.OnDemand = OnDemandOf(snapshot)
	if r.job.Judged != nil {
		if err := r.job.Judged(t.family, t.result.Tables); err != nil {
			t.result.Outcome, t.result.Err = Failed, err
			return false
		}
	}
	if len(t.sent) > 0 || t.nonce == "" { // otherwise nothing was written with this nonce
		t.nonce = canary.NewNonce()
	}
	absent := r.supply(ctx, t, tasks)
	for i := range tasks {
		task := &tasks[i]
		task.unavailable, task.doubled = absent, r.job.Doubled[t.family.Table(task.table)]
		task.unavailable.refused = r.refusals(t, *task)
		task.unavailable.misread = misreadOf(task.quarantined)
		maps.Copy(task.unavailable.misread, t.misread[task.table])
		task.session, task.textOnly = r.session, t.textOnly
	}
	t.plans = r.planTables(t, tasks, snapshot.Misfits)
	for i := range t.plans {
		t.plans[i].script.ByMarks = job.ByMarks
	}
	if job.Strict {
		t.reportSkipped()
	}
	t.sent, t.written = nil, nil
	if len(t.plans) == 0 {
		t.result.Outcome = t.outcomeWithoutWrite()
	}
	return len(t.plans) > 0
}

// refusals returns the rules of a table to leave out as refused, with the reasons. Trials of this
// run found some of them, and earlier runs the others. These others count unless the action retries
// them: to find them again would cost 30 trials in the middle of an outage. Another chain may take
// a quarantined rule, so it is left out of its own chain only.
func (r run) refusals(t *familyRun, task tableTask) placedReasons {
	list := task.quarantined
	if r.action.retriesRefused {
		list = nil
	}
	if r.job.Strict { // a declared rule is tried again, because its table waits for it
		list = slices.DeleteFunc(slices.Clone(list), func(h QuarantinedRule) bool { return task.claimed(h.Chain) || task.claimed(h.Rule.Target) })
	}
	all := placedReasons{}
	for _, h := range list {
		if h.Refused {
			all.add(h.Chain, h.Rule.Key(), h.Reason)
		}
	}
	for key, reason := range t.refused[task.table] {
		all.add(anyChain, key, reason)
	}
	for chain, list := range t.named[task.table] {
		for key, reason := range list {
			all.add(chain, key, reason)
		}
	}
	return all
}

// examine reads one family under guard and judges its tables, for plan and for a drill. The
// tasks are the tables that may be planned.
func (r Replayer) examine(ctx context.Context, s iptables.Session, f rules.Family, job Job) ([]tableTask, iptables.Snapshot, error) {
	snapshot, err := s.Read(ctx, f)
	if err != nil {
		return nil, iptables.Snapshot{}, fmt.Errorf("reading %s: %w", f, err)
	}
	if job.Latest != nil {
		job.Generation = job.Latest(f, snapshot.Digest)
	}
	job.Generation = job.withTexts(s, f)
	examiner := Examiner{Canary: r.Canary, Protection: r.Protection}
	return examiner.tasks(snapshot, job), snapshot, nil
}

// withTexts returns the generation of a family, and adds texts to rules that were learned without
// one. The session knows these texts by now, and reads the same rules of other owners by text,
// too. A quarantined rule stays as it is, because the quarantine finds it by its Key.
func (j Job) withTexts(s iptables.Session, f rules.Family) rules.Generation {
	return j.Generation.WithTexts(func(id rules.TableID, chain string, rule rules.Rule) rules.Rule {
		if id.Family != f {
			return rule
		}
		held := func(h QuarantinedRule) bool { return h.Chain == chain && h.Rule == rule }
		text := s.Text(f, rule)
		if text != rule && slices.ContainsFunc(j.Quarantine[id], held) {
			return rule
		}
		return text
	})
}

// newResult returns the result of a family that was judged and not written yet. plan calls it;
// prove adds the effect of the write.
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
