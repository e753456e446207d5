// Package reload puts a generation back and proves it. It learns generations from the kernel, plans
// and writes replays under guard, and keeps generations on disk.
//
// An [Examiner] judges a full read by a [Job]. The job says guarded now: the
// generation, the marks, and the memory of earlier tries for the same loss. What an owner decided
// goes into [Learned], and so into the next generation. A [Replayer] writes: Plant makes marks,
// Heal puts back what is lost, Rotate renews the marks, and Force restores a generation that an
// operator names. PreviewHeal and PreviewForce return what Heal and Force would change. Each write
// returns a [Result] with an [Outcome] for each family. Its marks, its [Quarantine] and its
// findings go into the next Job. A [Store] keeps generations and state on disk, and a [Limiter]
// says when the next replay may begin.
//
// Jobs and results are values, and nothing is kept between calls: the caller is one loop that owns
// its state. A Replayer may be copied, but only one replay at a time may run.
//
// An error of a Replayer's method means that no session could begin, and that nothing was read or
// written (iptables.ErrLocked). What became of a family is in its [FamilyResult]: Outcome says how
// it ended, and Err what went wrong first; callers distinguish [ErrUnproved], and three
// errors of a Store: [ErrNothingStored], [ErrForeign] and [ErrNewer].
//
// What a replay guarantees while owners go on writing:
//
//   - On nft, directly: the kernel takes the transaction only if no commit followed the read that
//     it rests on, because it compares the genid itself. It writes all tables of both families or
//     none. A long replay has two transactions: filter and mangle of both families, then nat.
//   - On nft, by iptables-restore: canaryd compares the genid before it starts the program, and
//     counts it afterwards. Each table is a transaction of its own. A commit in between makes the
//     replay raced, and canaryd asks kube-proxy for a full sync. What another owner wrote to a
//     replayed chain in those milliseconds, and does not write again, can be lost.
//   - On legacy: canaryd holds the xtables lock from read to proof. It notices a writer that
//     ignores the lock before the restore, but not during it.
//
// A replay is done only when a read after it shows every table as planned. If a flush may have
// removed rules of kube-proxy, canaryd makes it do a full sync after the replay, so that its newest
// rules stand in the end.
//
// What a replay does not guarantee:
//
//   - If other processes commit between read and restore five times in a row, the next write
//     rests on an old read, and counts as raced.
//   - Rules that were removed less than 2 s before a flush, and on legacy rules that were written
//     less than 250 ms before it, are not learned yet. The older state comes back, and stays
//     unless its owner is kube-proxy or checks its rules.
//   - CNI plugins write once, rule by rule. What one removes between flush and replay comes back
//     if the flush deleted chains as well, or if the rule led to no chain of its own. What one
//     adds stays, and chains that Protection.Piecewise names get the missing rules of the others
//     next to it. Any other chain that holds rules again stays as its owner wrote it.
//   - Where saved rules replaced a table, everything protected becomes what it was before, even
//     what an owner wrote in between; the same holds if they are flushed before the replay (see
//     Memory). A file that was saved after the last change but one, and before the marks were
//     renewed, counts as its owner's decision. Marks are renewed 200 ms after a change, 10 s after
//     single commands removed rules and no process added any, or every 10 s while changes go on.
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
	// BeforeWrite, if set, is called before a restore with the job's marks, to which those of the
	// restore are added as tried. A caller that saves them recognises its own write even if it is
	// killed before the proof.
	BeforeWrite func(canary.Marks)
	// Proved, if set, is called as soon as a family's replay was proved or failed. The other family
	// and kube-proxy's sync come later, and may take longer.
	Proved func(Job, rules.Family, FamilyResult)
	// Supplier creates ipsets and nfacct objects. If it is nil, canaryd does not check whether they
	// exist.
	Supplier Supplier
}

// A Job is what a replay, a planting or a rotation starts from.
type Job struct {
	Families   []rules.Family
	Generation rules.Generation
	Marks      canary.Marks
	// Over reports whether the jump grace of something missing is over; see canary.Seen. Nil means
	// that none is.
	Over func(rules.TableID, rules.Jump) bool
	// Quiet has the families in which the grace of everything is over.
	Quiet map[rules.Family]bool
	// Robbed are the living containers of each family whose rules another process than their owner
	// deleted by name.
	Robbed map[rules.Family]map[protect.Attachment]bool
	// Purged is called for each read. It returns what reports whether a chain lost its rules, or a
	// built-in chain a jump to target, to a process that is no owner; nil if none did. See
	// canary.Wanted.
	Purged func() func(id rules.TableID, chain, target string) bool
	// Claimed reports whether a declared source owns a chain; nil means that none is.
	Claimed func(chain string) bool
	// Quarantine has the rules that earlier replays quarantined.
	Quarantine Quarantine
	// Sets are the ipsets that rules name, with the members that were captured.
	Sets map[string]iptables.Set
	// Memory is what is known of the loss that the job is to end.
	Memory Memory
	// Doubled are the jumps whose surplus copies RemoveDoubles deletes.
	Doubled map[rules.TableID][]rules.Jump
	// GoneContainers are the containers whose rules RemoveContainers deletes.
	GoneContainers map[protect.Attachment]bool
	// Pace is how long one rule took to write in the last replays.
	Pace Pace
	// Settle waits until the flusher is quiet, while the plan is ready to be written. It gets the
	// memory with what the plan's reads found, and returns it with what its own reads found. again
	// means that another process wrote meanwhile, and that the job is planned again. nil means that
	// the flusher is quiet.
	Settle func(context.Context, Memory) (now Memory, again bool)
	// Latest, if set, is called after each guarded read of a family with the digest of that. It
	// returns the generation that takes the place of Generation.
	Latest func(f rules.Family, digest uint64) rules.Generation
	// Rider, if set, returns what another realm adds to the write that is about to begin; nil if
	// nothing. It is called once for each try, after the families were read.
	Rider func() *iptables.Rider
	// Strict makes a table stay as it is if one of its claimed rules is refused. Without it only
	// that rule is missing. Other tables are written. Refused are the rules that the last try found
	// refused; they are tried first.
	Strict  bool
	Refused Refusals
	// Judged, if set, is called with what each guarded read of a family found, before BeforeWrite
	// and before any write. The last call counts.
	Judged func(rules.Family, map[rules.TableName]TableResult)
	// Check, if set, is called right before each write with what that write would change. On an
	// error nothing more is written. A checked job never writes without a guard.
	Check func(Changes) error
	// Interrupted, if set, is asked between the trials of refused rules: true ends them, because
	// something else was lost that should not wait. The next replay begins them again.
	Interrupted func() bool
	// LeaveAbsent reports whether a table gets no first marks while it does not exist and the
	// generation has nothing in it: a write would create the table. nil means that none does.
	LeaveAbsent func(rules.Family, rules.TableName) bool
}

// A Result is what became of a job, by family.
type Result map[rules.Family]FamilyResult

// A FamilyResult is what became of one family.
type FamilyResult struct {
	Outcome Outcome
	Tables  map[rules.TableName]TableResult
	Took    time.Duration // from the first read to the proof
	Done    time.Time     // when the proof ended
	// Written is when the last table was written, before the proof; zero if nothing was. Kernel is
	// how long the kernel took for canaryd's own transactions that wrote it, with all families.
	Written time.Time
	Kernel  time.Duration
	// Err is what went wrong first; nil if Outcome.Done.
	Err error
	// Aftercare is why kube-proxy could not be asked for a full sync. The rules are in force all
	// the same.
	Aftercare error
	// SyncNeeded means that kube-proxy has to do a full sync. The replay asked for it if
	// ProxyCanaryStands; otherwise it could not.
	SyncNeeded bool
	// Digest identifies the content of the last read, like a Probed's. It is 0 if nothing could be
	// read, or if another process wrote meanwhile.
	Digest uint64
	// Proof is the digest of the read after the write, also if another process wrote meanwhile; 0
	// if there was no such read. It shows those tables in force that are Proved.
	Proof uint64

	// OnDemand are the tables that are guarded on demand and could be read, as the last read showed
	// them; nil is a table that does not exist.
	OnDemand map[rules.TableName]*rules.Table

	// Seen is the digest of the guarded read that the findings come from; 0 if nothing could be
	// read.
	Seen uint64

	// Direct are the tables that were written by netlink in one transaction. Detour is why others
	// went through iptables-restore; see iptables.Written.
	Direct []rules.TableName
	Detour error

	wroteRules  int               // how many commands the restore wrote
	writing     time.Duration     // how long that took, for all families together
	otherWrote  bool              // another process wrote between the guarded read and the proof
	overtaken   bool              // and the last write was refused because of that
	proxyCanary []rules.TableName // where the proof saw kube-proxy's canary
}

// Beaten reports whether the replay is not proved because another process wrote between its guarded
// read and the proof. Nothing of it was refused for another reason.
func (r FamilyResult) Beaten() bool {
	_, refused := errors.AsType[*iptables.RestoreError](r.Err)
	return r.otherWrote && !r.Outcome.Done() && (!refused || r.overtaken)
}

// DoneExceptQuarantined reports whether everything is proved but for quarantined rules.
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

// A TableResult is what became of one table.
type TableResult struct {
	Finding canary.Finding // what the guarded read showed that the plan rests on
	Mark    canary.Mark    // the mark that is planted now, as far as is known
	Section rules.Section  // the protected part of the last read; nil maps if it failed
	Read    bool           // Section and Mark come from a read
	Absent  bool           // the last read showed that the table does not exist
	Table   *rules.Table   // the complete table of the last read; nil if there was none
	Seen    *rules.Table   // the complete table of the guarded read that the plan rests on
	Lost    Lost
	Proved  bool
	// Landed means that the marks of the write stand, although the table is not as it was written.
	Landed bool
	// Unproved means that the table was written and could not be read since. Mark is tried then.
	Unproved bool
	Skipped  []string // chains that their owner had put back before
	// Replayed means that rules were written, and not marks alone. Then Quarantined are all
	// quarantined rules of the table, and Weakened the rules that were written without a match that
	// only counts.
	Replayed    bool
	Quarantined []QuarantinedRule
	Weakened    []QuarantinedRule
	// Meant has the chains and jumps that the replay did not write as the job's generation has
	// them; see Learned.Mean.
	Meant rules.Section
	// Refused is why a strict job left the table as it is; nil if it wrote the table.
	Refused []Refusal
	// LostBeforeProof is what stood when the table got its first marks, if another process removed
	// those before the proof. No other read shows what that process removed with them.
	LostBeforeProof *rules.Section
	Policies        []string     // built-in chains whose policy differs from the generation's
	Wrote           int          // how many chains were written
	Placed          []rules.Jump // jumps that were put back
	Changed         Change       // what a checked job changed in the protected rules

	// flushed means that no mark was left standing, so rules may be lost that were not learned yet.
	flushed  bool
	restored bool           // saved rules stood in the table
	last     canary.Finding // of the last read
	// misread is what the write left otherwise than planned while no other process wrote, and
	// misreadRules are the rules of the plan of which it made something else.
	misread      misread
	misreadRules []rules.Rule
}

// Heal puts back what the generation has and the kernel lacks, in all families by one restore, and
// proves it. It touches no table that lost nothing, and none that could not be read, because such a
// table is unknown.
func (r Replayer) Heal(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: heal, mayWriteUnguarded: true, writesRules: true, mayStage: true, asksProxy: true})
}

// Plant writes a canary and witnesses to every table that never had them. It does not replace lost
// marks, because those are the evidence of a flush.
func (r Replayer) Plant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plantFirst, mayWriteUnguarded: true})
}

// Replant also replaces lost marks. Where nothing is replayed, the next flush must still be
// noticed.
func (r Replayer) Replant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plant, mayWriteUnguarded: true})
}

// Rotate gives intact tables a new nonce, and each chain with a jump a witness. A table that needs
// no marks any more loses its own. It is due after the generation has changed. A file that was
// saved before the change has the old nonce; only a new nonce shows that such a file was restored.
func (r Replayer) Rotate(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: rotate})
}

// Force makes the protected part of every table exactly what the generation says, because an
// operator asked for that generation. It leaves tables alone that the generation lacks: those could
// not be read when it was learned.
func (r Replayer) Force(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: force, mayWriteUnguarded: true, writesRules: true, allTables: true, retriesRefused: true})
}

// Readmit puts back the rules of job.Quarantine that can be written by now, into chains that stand
// as the replay left them. A result is Skipped if there are none.
func (r Replayer) Readmit(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: readmit, writesRules: true, retriesRefused: true})
}

// RemoveDoubles deletes the copies of job.Doubled's jumps that the generation does not have.
func (r Replayer) RemoveDoubles(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: removeDoubles})
}

// Remove deletes every canary and witness and, with everything, the protected chains and jumps too.
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

// each runs one action for every family of the job in one session.
func (r Replayer) each(ctx context.Context, job Job, do action) (Result, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning a guarded write: %w", err)
	}
	result := run{r, s, job, do}.families(ctx)
	for _, f := range job.Families {
		fr := result[f]
		// kube-proxy is asked even if some tables are still missing: the next try does not touch
		// those that are proved now.
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

// An action says what is written to a table, and what the run may do for that.
type action struct {
	// plan returns what to write to a table; nil means nothing.
	plan func(task tableTask, nonce canary.Nonce) *tablePlan
	// mayWriteUnguarded: if a busy writer makes every try stale, write without a guard.
	mayWriteUnguarded bool
	// mayStage: filter and mangle may be written before nat.
	mayStage bool
	// asksProxy: kube-proxy is asked for a full sync, where it has to do one.
	asksProxy bool
	// writesRules: rules of the generation may be written. allTables: in every table, lost or not.
	// retriesRefused: rules that were refused before are tried again.
	writesRules, allTables, retriesRefused bool
}

// vacant reports whether the table does not exist and nothing is wanted in it.
func (t tableTask) vacant() bool {
	return t.absent() && t.want.Mark.Nonce == "" && t.want.Section.Bare()
}

// heal plans a replay for a table that lost something.
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

// force plans to write the complete generation to a table.
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

// plant plans marks for a table that lacks some. Its witnesses go where jumps stand now.
func plant(task tableTask, nonce canary.Nonce) *tablePlan {
	unplanted := task.seen.Err == nil && task.want.Mark.Nonce == ""
	if !unplanted && !task.finding.MarkLost && len(task.finding.Witnesses) == 0 || task.leaveAbsent && task.vacant() {
		return nil
	}
	if task.finding.Unmarked {
		if plan := composeRemoval(task, false); !plan.script.Empty() {
			return plan // an earlier run left marks that are not known any more
		}
		return nil
	}
	task.want.Section.Jumps = task.seen.Section.Jumps
	return composePlant(task, nonce)
}

// plantFirst plans marks for a table that never had any.
func plantFirst(task tableTask, nonce canary.Nonce) *tablePlan {
	if task.want.Mark.Nonce != "" {
		return nil
	}
	return plant(task, nonce)
}

// rotate plans new marks for an intact table.
func rotate(task tableTask, nonce canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed || task.want.Mark.Nonce == "" {
		return nil
	}
	if task.want.Needless(task.seen) {
		return composeWithdrawal(task)
	}
	task.want.Section.Jumps = task.seen.Section.Jumps
	return composeRotation(task, nonce)
}
