// Package reload puts a generation back and proves it. It learns generations from the kernel, plans
// and writes replays under guard, and keeps generations on disk.
//
// An [Examiner] judges a full read by a [Job]. The job holds the rules that ought to be in force:
// the generation, the marks, and the memory of earlier tries for the same loss. [Learned] takes
// in an owner's decision, and so does the next generation. A [Replayer] writes: Plant makes
// marks, Heal puts back lost rules, Rotate renews the marks, and Force restores a generation that
// an operator names. PreviewHeal and PreviewForce return the changes that Heal and Force would
// make. Each write returns a [Result] with an [Outcome] for each family. The next Job gets its
// marks, its [Quarantine] and its findings. A [Store] keeps generations and state on disk, and a
// [Limiter] says when the next replay may begin.
//
// Jobs and results are values, and nothing is kept between calls: the caller is one loop that owns
// its state. A Replayer may be copied, but only one replay at a time may run.
//
// An error of a Replayer's method means that no session could begin, and that nothing was read or
// written (iptables.ErrLocked). A [FamilyResult] holds the Outcome of one family, and its first
// error in Err. Callers distinguish [ErrUnproved], and three errors of a Store:
// [ErrNothingStored], [ErrForeign] and [ErrNewer].
//
// Guarantees of a replay while owners continue to write:
//
//   - On nft, directly: the kernel compares the genid itself, and takes the transaction only if
//     no commit followed the read. It writes all tables of both families or none. A long replay
//     has two transactions: filter and mangle of both families, then nat.
//   - On nft, by iptables-restore: canaryd compares the genid before it starts the program, and
//     counts it afterwards. Each table is a transaction of its own. A commit in between makes the
//     replay raced, and canaryd requests a full sync from kube-proxy. Another owner may write a
//     rule to a replayed chain in those milliseconds. That rule can be lost, unless its owner
//     writes it again.
//   - On legacy: canaryd holds the xtables lock from read to proof. It notices a writer that
//     ignores the lock before the restore, but not during it.
//
// A replay is done only when a read after it shows every table as planned. If a flush may have
// removed rules of kube-proxy, canaryd makes it do a full sync after the replay. So kube-proxy's
// newest rules are in force in the end.
//
// Limits of a replay:
//
//   - If other processes commit between read and restore five times in a row, the next write uses
//     an old read, and counts as raced.
//   - A change is not learned at once: a removal takes 2 s, and on legacy an added rule 250 ms.
//     If a flush follows sooner, the replay restores the older state, unless the caller passes
//     the result of Cut. That state stays unless its owner is kube-proxy or checks its rules.
//   - CNI plugins write once, rule by rule. A plugin may remove a rule between flush and replay.
//     The replay puts the rule back if the flush also deleted chains, or if the rule led to no
//     chain of its own. A rule that the plugin adds stays, and chains that Protection.Piecewise
//     names get the missing rules of the others next to it. Any other chain that holds rules
//     again stays as its owner wrote it.
//   - Where saved rules replaced a table, everything protected returns to its state before, and
//     an owner's writes in between are lost. The same holds if they are flushed before the replay
//     (see Memory). A file that was saved after the last change but one, and before the marks
//     were renewed, counts as its owner's decision. Marks are renewed 200 ms after a change, or
//     every 10 s while changes continue. At 5,000 services it is every 20 s next to commits without
//     a pause, and more seldom on a busy machine. If single commands removed rules and no process
//     added any, marks are renewed 10 s later.
//   - A kube-proxy that noticed a flush may miss a second one, if its own full sync ends more
//     than 15 s after the replay.
//   - An owner that checks for its jump and inserts it in two commands, with a replay in between,
//     leaves the jump doubled; see RemoveDoubles.
package reload

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Outcome says how a replay of one family ended. It is a label of canaryd_replays_total.
type Outcome string

// The outcomes.
const (
	Proved  Outcome = "proved"  // everything is in force, and a read showed it
	Raced   Outcome = "raced"   // everything is in force, but another process wrote meanwhile
	Partial Outcome = "partial" // some tables or rules are still missing
	Failed  Outcome = "failed"  // nothing could be put back
	Skipped Outcome = "skipped" // the guarded read showed nothing lost
)

// Outcomes returns every outcome.
func Outcomes() []Outcome { return []Outcome{Proved, Raced, Partial, Failed, Skipped} }

// Done reports whether nothing is left to put back.
func (o Outcome) Done() bool { return o == Proved || o == Raced || o == Skipped }

// A Beginner begins guarded sessions.
type Beginner interface {
	Begin(context.Context) (iptables.Session, error)
}

// A Replayer replays generations through one kernel. It keeps no state and may be copied, but only
// one replay at a time may run.
type Replayer struct {
	Kernel     Beginner
	Canary     string // the canary chain's name
	Protection rules.Protection
	// BeforeWrite, if set, is called before a restore with the job's marks and, as tried, the
	// marks of the restore. A caller that saves them recognises its own write even if it is
	// killed before the proof.
	BeforeWrite func(canary.Marks)
	// Proved, if set, is called as soon as a family's replay was proved or failed. The other
	// family and kube-proxy's sync follow later, and may take longer.
	Proved func(Job, rules.Family, FamilyResult)
	// Supplier creates ipsets and nfacct objects. If it is nil, canaryd does not check whether they
	// exist.
	Supplier Supplier
}

// A Job holds the inputs of a replay, a planting or a rotation.
type Job struct {
	Families   []rules.Family
	Generation rules.Generation
	Marks      canary.Marks
	// Over reports whether the jump grace of a missing part is over; see canary.Seen. Nil means
	// that no grace is.
	Over func(rules.TableID, rules.Jump) bool
	// Quiet has the families in which every grace is over.
	Quiet map[rules.Family]bool
	// Robbed has the living containers of each family whose rules another process than their owner
	// deleted by name.
	Robbed map[rules.Family]map[protect.Attachment]bool
	// Purged is called for each read. The returned function reports whether a process that is no
	// owner removed rules of a chain, or a built-in chain's jump to target. nil means that none
	// did. See canary.Wanted.
	Purged func() func(id rules.TableID, chain, target string) bool
	// Claimed reports whether a declared source owns a chain; nil means that no source owns any.
	Claimed func(chain string) bool
	// Quarantine has the rules that earlier replays quarantined.
	Quarantine Quarantine
	// Sets has the ipsets that rules name, with the members that were captured.
	Sets map[string]iptables.Set
	// Memory has the results of earlier reads and tries for the loss that the job is to end.
	Memory Memory
	// Doubled has the jumps whose surplus copies RemoveDoubles deletes.
	Doubled map[rules.TableID][]rules.Jump
	// GoneContainers has the containers whose rules RemoveContainers deletes.
	GoneContainers map[protect.Attachment]bool
	// Pace is the time that the last replays took to write one rule.
	Pace Pace
	// Settle waits until the flusher is quiet, while the plan is ready to be written. It gets the
	// memory with the findings of the plan's reads, and returns it with the findings of its own
	// reads. again means that another process wrote meanwhile, and that the job is planned again.
	// nil means that the flusher is quiet.
	Settle func(context.Context, Memory) (now Memory, again bool)
	// Latest, if set, is called after each guarded read of a family with the digest of the read.
	// It returns the generation that replaces Generation.
	Latest func(f rules.Family, digest uint64) rules.Generation
	// Rider, if set, returns the parts that another realm adds to the write that is about to
	// begin; nil if there are none. It is called once for each try, after the families were read.
	Rider func() *iptables.Rider
	// Strict leaves a table as it is if one of its claimed rules is refused; otherwise only that
	// rule is missing. Other tables are written. Refused has the rules that the last try found
	// refused; they are tried first.
	Strict  bool
	Refused Refusals
	// ByMarks lets Rotate write although other processes commit meanwhile, if all marks are still
	// there; see iptables.Script.
	ByMarks bool
	// Judged, if set, is called with the findings of each guarded read of a family, before any
	// write. The last call counts. On an error nothing more is written to the family.
	Judged func(rules.Family, map[rules.TableName]TableResult) error
	// Check, if set, is called right before each write with the changes that the write would
	// make. On an error nothing more is written. A checked job never writes without a guard.
	Check func(Changes) error
	// Interrupted, if set, is called between the trials of refused rules. If it returns true, the
	// trials end, because another loss should not wait. The next replay begins them again.
	Interrupted func() bool
	// LeaveAbsent reports whether a table that does not exist gets no first marks, because the
	// generation has nothing in it: a write would create it. nil means that every table gets them.
	LeaveAbsent func(rules.Family, rules.TableName) bool
}

// A Result is the outcome of a job, by family.
type Result map[rules.Family]FamilyResult

// A FamilyResult is the outcome of one family.
type FamilyResult struct {
	Outcome Outcome
	Tables  map[rules.TableName]TableResult
	Took    time.Duration // from the first read to the proof
	Done    time.Time     // when the proof ended
	// Written is when the last table was written, before the proof; zero if nothing was. Kernel
	// is the time that the kernel took for canaryd's own transactions that wrote it, with all
	// families.
	Written time.Time
	Kernel  time.Duration
	// Err is the first error; nil if Outcome.Done.
	Err error
	// Aftercare is the reason why canaryd could not request a full sync from kube-proxy. The
	// rules are in force anyway.
	Aftercare error
	// SyncNeeded means that kube-proxy has to do a full sync. The replay requested it if
	// ProxyCanaryStands; otherwise it could not.
	SyncNeeded bool
	// Digest identifies the content of the last read, like a Probed's. It is 0 if nothing could be
	// read, or if another process wrote meanwhile.
	Digest uint64
	// Proof is the digest of the read after the write, also if another process wrote meanwhile; 0
	// if there was no such read. It shows the Proved tables in force.
	Proof uint64

	// OnDemand has the tables that are guarded on demand and could be read, as the last read
	// showed them. A table that does not exist is nil.
	OnDemand map[rules.TableName]*rules.Table

	// Seen is the digest of the guarded read that the findings are from; 0 if nothing could be
	// read.
	Seen uint64

	// Direct has the tables that were written by netlink in one transaction. Detour is the reason
	// why others were written by iptables-restore; see iptables.Written.
	Direct []rules.TableName
	Detour error

	wroteRules  int               // how many commands the restore wrote
	writing     time.Duration     // how long that took, for all families together
	otherWrote  bool              // another process wrote between the guarded read and the proof
	overtaken   bool              // the last write was refused because of another process's write
	proxyCanary []rules.TableName // where the proof saw kube-proxy's canary
}

// Beaten reports whether the replay is not proved because another process wrote between its
// guarded read and the proof. None of its writes was refused for another reason.
func (r FamilyResult) Beaten() bool {
	_, refused := errors.AsType[*iptables.RestoreError](r.Err)
	return r.otherWrote && !r.Outcome.Done() && (!refused || r.overtaken)
}

// DoneExceptQuarantined reports whether only quarantined rules are unproved: no retry is due.
func (r FamilyResult) DoneExceptQuarantined() bool {
	left := 0
	for _, tr := range r.Tables {
		if tr.Finding.Verdict.Loss() && !tr.Proved {
			return false
		}
		left += len(tr.Quarantined)
	}
	return r.Outcome == Partial && left > 0
}

// A TableResult is the outcome of one table.
type TableResult struct {
	Finding canary.Finding // of the guarded read that the plan uses
	Mark    canary.Mark    // the mark that is planted now, as far as canaryd knows
	Section rules.Section  // the protected part of the last read; nil maps if it failed
	Read    bool           // Section and Mark are from a read
	Absent  bool           // the last read showed that the table does not exist
	Table   *rules.Table   // the complete table of the last read; nil if there was none
	Seen    *rules.Table   // the complete table of the guarded read that the plan uses
	Lost    Lost
	Proved  bool
	// Landed means that the marks of the write are in force, although the table is not as it was
	// written.
	Landed bool
	// Unproved means that the table was written and could not be read since. Mark is tried then.
	Unproved bool
	Skipped  []string // chains that their owner had put back before
	// Replayed means that rules were written, and not marks alone. Then Quarantined has all
	// quarantined rules of the table. Weakened has the rules that were written without a match
	// that only counts.
	Replayed    bool
	Quarantined []QuarantinedRule
	Weakened    []QuarantinedRule
	// Meant has the chains and jumps that the replay wrote otherwise than the job's generation
	// has them; see Learned.Mean.
	Meant rules.Section
	// Refused is the reason why a strict job left the table as it is; nil if it wrote the table.
	Refused []Refusal
	// LostBeforeProof is the section at the time when the table got its first marks, if another
	// process removed these before the proof. No other read shows the rules that the process
	// removed with them.
	LostBeforeProof *rules.Section
	Policies        []string     // built-in chains whose policy differs from the generation's
	Wrote           int          // how many chains were written
	Placed          []rules.Jump // jumps that were put back
	Changed         Change       // the changes of a checked job to the protected rules

	// flushed means that no mark was left, so rules may be lost that were not learned yet.
	flushed  bool
	restored bool           // saved rules were in the table
	last     canary.Finding // of the last read
	// misread has the chains and rules that the write left otherwise than planned, while no other
	// process wrote. misreadRules are the planned rules that it made into others.
	misread      misread
	misreadRules []rules.Rule
}

// Heal puts back the rules that the generation has and the kernel lacks, in all families by one
// restore, and proves it. It leaves alone each table that lost nothing, and each unreadable table,
// because its content is unknown.
func (r Replayer) Heal(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: heal, mayWriteUnguarded: true, writesRules: true, mayStage: true, asksProxy: true})
}

// Plant writes a canary and witnesses to every table that never had them. It does not replace
// lost marks, because they are the evidence of a flush.
func (r Replayer) Plant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plantFirst, mayWriteUnguarded: true})
}

// Replant also replaces lost marks. Without new marks, a table that is not replayed would not
// show the next flush.
func (r Replayer) Replant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plant, mayWriteUnguarded: true})
}

// Rotate gives intact tables a new nonce, and each chain with a jump a witness. A table that needs
// no marks any more loses its own. It is due after the generation has changed: a file that was
// saved before the change has the old nonce. Only a new nonce shows that such a file was restored.
//
// It tries once, because the caller may have more urgent work. The error of a stale try is
// nft.ErrStale. With job.ByMarks a try is stale only if a mark is gone.
func (r Replayer) Rotate(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: rotate, oneTry: true})
}

// Force makes the protected part of every table exactly as the generation has it, because an
// operator requested that generation. It leaves tables alone that the generation lacks: they
// could not be read when it was learned.
func (r Replayer) Force(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: force, mayWriteUnguarded: true, writesRules: true, allTables: true, retriesRefused: true})
}

// Readmit puts back the rules of job.Quarantine that can be written by now, into chains that are
// still as the replay left them. A result is Skipped if there are none.
func (r Replayer) Readmit(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: readmit, writesRules: true, retriesRefused: true})
}

// RemoveDoubles deletes the copies of job.Doubled's jumps that the generation does not have.
func (r Replayer) RemoveDoubles(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: removeDoubles})
}

// Remove deletes all marks and, with everything, protected chains and jumps too, for a cleanup.
func (r Replayer) Remove(ctx context.Context, job Job, everything bool) (Result, error) {
	remove := func(task tableTask, _ canary.Nonce) *tablePlan {
		if task.seen.Err != nil || task.seen.Table == nil {
			return nil
		}
		if plan := composeRemoval(task, everything); !plan.script.Empty() {
			return plan
		}
		return nil
	}
	return r.each(ctx, job, action{plan: remove, mayWriteUnguarded: true})
}

// each runs one action for every family of the job in one session, for the exported methods.
func (r Replayer) each(ctx context.Context, job Job, do action) (Result, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning a guarded write: %w", err)
	}
	result := run{r, s, job, do}.families(ctx)
	for _, f := range job.Families {
		fr := result[f]
		// canaryd requests the sync even if some tables are still missing: the next try leaves
		// the tables alone that are proved now.
		if do.asksProxy && needsProxySync(fr) {
			fr.SyncNeeded, fr.Aftercare = true, nudge(ctx, s, f, fr.proxyCanary)
			result[f] = fr
		}
	}
	if err := s.Close(); err != nil {
		return result, fmt.Errorf("ending a guarded write: %w", err)
	}
	return result, nil
}

// An action says how a table's write is planned, and which ways of writing the run may use.
type action struct {
	// plan returns the plan for a table; nil if there is nothing to write.
	plan func(task tableTask, nonce canary.Nonce) *tablePlan
	// mayWriteUnguarded: if a busy writer makes every try stale, write without a guard.
	mayWriteUnguarded bool
	// oneTry: a stale write is not tried again.
	oneTry bool
	// mayStage: filter and mangle may be written before nat.
	mayStage bool
	// asksProxy: canaryd requests a full sync from kube-proxy, where it has to do one.
	asksProxy bool
	// writesRules: rules of the generation may be written. allTables: in every table, lost or not.
	// retriesRefused: rules that were refused before are tried again.
	writesRules, allTables, retriesRefused bool
}

// vacant reports whether the table does not exist and the job wants nothing in it.
func (t tableTask) vacant() bool {
	return t.absent() && t.want.Mark.Nonce == "" && t.want.Section.Bare()
}

// heal plans a replay for a table with a loss. If only a drill took the canary, it plans marks.
func heal(task tableTask, nonce canary.Nonce) *tablePlan {
	if !task.finding.Verdict.Loss() {
		return nil
	}
	if task.finding.OnlyDrilled() {
		task.want.Section.Jumps = task.seen.Section.Jumps
		return composePlant(task, nonce)
	}
	return composeReplay(task, nonce)
}

// force plans to write the complete generation to a table, for Force and PreviewForce.
func force(task tableTask, nonce canary.Nonce) *tablePlan {
	if task.seen.Err != nil || !task.known || task.vacant() || task.want.Needless(task.seen) {
		return nil
	}
	task.finding = canary.Finding{
		Verdict: canary.Replaced, MarkLost: true,
		Jumps: task.want.Section.Jumps,
	}
	return composeReplay(task, nonce)
}

// plant plans marks for a table that lacks some, for Replant and plantFirst. Its witnesses are
// for the chains that have jumps now.
func plant(task tableTask, nonce canary.Nonce) *tablePlan {
	unplanted := task.seen.Err == nil && task.want.Mark.Nonce == ""
	if !unplanted && !task.finding.MarkLost && len(task.finding.Witnesses) == 0 || task.leaveAbsent && task.vacant() {
		return nil
	}
	if task.finding.Unmarked {
		if plan := composeRemoval(task, false); !plan.script.Empty() {
			return plan // an earlier run left marks that canaryd no longer knows
		}
		return nil
	}
	task.want.Section.Jumps = task.seen.Section.Jumps
	return composePlant(task, nonce)
}

// plantFirst plans marks for a table that never had any, for Plant.
func plantFirst(task tableTask, nonce canary.Nonce) *tablePlan {
	if task.want.Mark.Nonce != "" {
		return nil
	}
	return plant(task, nonce)
}
