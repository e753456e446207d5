// Package reload puts a generation back and proves it: it learns generations from the live
// kernel, composes restores, runs them guarded, and keeps generations on disk.
//
// An [Examiner] judges a full read by a [Job], which says what is wanted: the generation, the
// marks, and what earlier tries of the same loss found. What an owner decided goes into
// [Learned], and so into the next generation. A [Replayer] does the writing: Plant makes marks,
// Heal puts back what is lost, Rotate renews the marks, Force restores a generation that an
// operator names, and PreviewHeal and PreviewForce say what these would change. Each returns a
// [Result], by family and table, with an [Outcome]; its marks, its [Quarantine] and what it
// [Found] go into the next Job. A [Store] keeps generations and state on disk, a [Limiter] says
// when the next replay may begin.
//
// Jobs and results are values, and nothing is kept between calls: the caller is one loop that
// owns its state. A Replayer may be copied; one replay at a time may run.
//
// An error of a Replayer's method says that no session could begin, and nothing was read or
// written (iptables.ErrLocked). What became of a family is in its [FamilyResult]: see Outcome,
// and Err for the first thing that went wrong. A Store's errors that callers tell apart are
// [ErrNothingStored], [ErrForeign] and [ErrNewer].
//
// What is guaranteed beside owners who go on writing:
//
//   - nft, directly: what is written rests on a read that nobody's commit came
//     after. The kernel compares the genid in the transaction itself, and all
//     tables of both families are written or none is. Where that takes long, filter
//     and mangle of both families are one transaction, and nat is the next.
//   - nft, by iptables-restore: the genid is compared before the program is
//     started, and counted after it; each table is a transaction of its own. A
//     commit that slips in is told as raced, and kube-proxy is asked for a full
//     sync. What another owner wrote to a chain in just those milliseconds, and
//     will not write again, can be lost.
//   - legacy: the xtables lock is held from read to proof. Who takes another lock
//     file, or none, is noticed before the restore and not during it.
//
// A replay counts as done only when a read after it shows every table as
// intended. Whenever a flush may have taken rules of kube-proxy's, it is made to
// do a full sync after the replay, so that the end is its newest.
//
// What is not guaranteed:
//
//   - beside a writer who commits between read and restore five times in a row,
//     the sixth write rests on a read of the past; it is told as raced;
//   - what was written less than 250 ms before a flush, or removed less than 2 s
//     before, is not known yet: what stood before it comes back, for good if its
//     owner neither looks again nor is kube-proxy;
//   - what an owner that writes once and rule by rule (CNI) removes between flush and
//     replay comes back if the flush deleted chains, too, and so does a rule of its
//     that led to no chain of its own; what it adds meanwhile stays, and in a chain
//     that Protection.Piecewise names, what is missing of others' comes back next to it. In any
//     other chain that holds rules again, its owner's word stands alone;
//   - where saved rules replaced a table, all that is protected becomes what it was
//     before, also what an owner wrote in between, and so it does if they are flushed
//     before they are replaced, see Memory; a file that was saved after the
//     last change but one, and before the marks were renewed (200 ms after the last
//     one, and once in 10 s beside owners who never rest) is taken for its owner's
//     decision;
//   - a kube-proxy that noticed a flush and takes more than 15 s from the replay to
//     the end of its own full sync, with another flush in between;
//   - an owner that looks for its jump and inserts it in two commands, with a
//     replay in between, leaves the jump doubled; see Undouble.
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

// An Outcome says how a replay of one family ended. It is the label of
// canaryd_replays_total.
type Outcome string

// The outcomes.
const (
	Proved  Outcome = "proved"  // everything is in force, and a read showed it
	Raced   Outcome = "raced"   // the same, but somebody else wrote meanwhile
	Partial Outcome = "partial" // some tables or rules are still missing
	Failed  Outcome = "failed"  // nothing could be put back
	Skipped Outcome = "skipped" // nothing was lost any more when it was looked at under guard
)

// Outcomes returns every outcome.
func Outcomes() []Outcome { return []Outcome{Proved, Raced, Partial, Failed, Skipped} }

// Done reports whether nothing is left to put back.
func (o Outcome) Done() bool { return o == Proved || o == Raced || o == Skipped }

// A Beginner begins guarded sessions.
type Beginner interface {
	Begin(context.Context) (iptables.Session, error)
}

// A Replayer replays generations through one kernel. It keeps no state and may
// be copied; one replay at a time may run.
type Replayer struct {
	Kernel     Beginner
	Canary     string // the canary chain's name
	Protection rules.Protection
	// BeforeWrite, unless it is nil, is told before each restore the job's marks with
	// those that it is about to plant as tried. Who keeps them knows its own
	// write again, even if it is killed before it can prove it.
	BeforeWrite func(canary.Marks)
	// Proved, unless it is nil, gets what became of a family's replay as soon as
	// it was proved, or failed: before the other family's and the aftercare, which
	// may take longer than it.
	Proved func(Job, rules.Family, FamilyResult)
	// Supplier has ipsets and nfacct objects; nil means that nobody looks
	// whether they are there.
	Supplier Supplier
}

// A Job is what a replay, planting or rotation starts from.
type Job struct {
	Families   []rules.Family
	Generation rules.Generation
	Marks      canary.Marks
	// Quiet says of which families nothing protected changed for the jump
	// grace.
	Quiet map[rules.Family]bool
	// Stood tells the chains that have stood empty for the jump grace; nil means
	// none.
	StoodEmpty func(f rules.Family, t rules.TableName, chain string) bool
	// Claimed tells the chains of a declared source; nil means none.
	Claimed func(chain string) bool
	// Quarantine are the rules of the generation that were held back before.
	Quarantine Quarantine
	// Sets are the ipsets that rules name, as they were captured.
	Sets map[string]iptables.Set
	// Memory is that of the loss that the job is to end.
	Memory Memory
	// Doubled are the jumps of which copies are to go; for Undouble.
	Doubled map[rules.TableID][]rules.Jump
	// Gone are the containers of which nothing is to stand; for TakeAway.
	GoneContainers map[protect.Attachment]bool
	// Pace is what a rule took to write in the last replays.
	Pace Pace
	// Settle waits until the flusher is done, while a replay is planned already. It
	// gets the memory with what the plans' reads found, and returns it with its own reads;
	// again means that another process wrote meanwhile, and everything is to be
	// planned once more. nil: the flusher is done.
	Settle func(context.Context, Memory) (now Memory, again bool)
	// Strict: a table with a claimed rule that is refused stays as it is, rather than
	// get all but that rule. Other tables are written. Refused are the rules that
	// were refused the last time; they are tried first.
	Strict  bool
	Refused Refusals
	// Judged, unless it is nil, gets what each guarded read of a family found before
	// anything that rests on it is written, or passed to BeforeWrite. The last call counts.
	Judged func(rules.Family, map[rules.TableName]TableResult)
	// Check, unless it is nil, is asked right before each write for what that would change,
	// by the read that the write rests on; with an error nothing more is written. The
	// write is never made without a guard then.
	Check func(Changes) error
	// Spare names the tables that get no first marks while they do not exist and the
	// generation has nothing in them; nil means none. To write to a table makes it.
	LeaveAbsent func(rules.Family, rules.TableName) bool
}

// A Result is what became of a job, by family.
type Result map[rules.Family]FamilyResult

// A FamilyResult is what became of one family.
type FamilyResult struct {
	Outcome Outcome
	Tables  map[rules.TableName]TableResult
	Took    time.Duration // from the first read to the proof
	Done    time.Time     // when the proof was had
	// Written is when the last table was written, before its proof; zero if
	// nothing was. Kernel is what the kernel took for the transactions of our own
	// that wrote it, together with other families.
	Written time.Time
	Kernel  time.Duration
	// Err is the first thing that went wrong; nil if Outcome.Done.
	Err error
	// Aftercare is why kube-proxy could not be asked for a full sync; the rules are in
	// force all the same.
	Aftercare error
	// Owed: kube-proxy is to have the last word. It was asked for a full sync if
	// ProxyStands, and could not be otherwise.
	SyncNeeded bool
	// Digest identifies the content of the last read, as a Probed's does;
	// 0 if nothing could be read, or somebody else wrote meanwhile.
	Digest uint64

	// Seen is the digest of the guarded read that the tables' findings come from; 0 if
	// nothing could be read.
	Seen uint64

	// Direct are the tables that were written by netlink, all at once, and
	// Detour is why others went through iptables-restore; see iptables.Written.
	Direct []rules.TableName
	Detour error

	wroteRules  int               // how many commands were written, by the restore that
	writing     time.Duration     // took so long, for all families together
	otherWrote  bool              // somebody else wrote between the guarded read and the proof
	proxyCanary []rules.TableName // where the proof saw kube-proxy's canary
}

// Beaten reports whether the replay is not proved, nothing of it was refused,
// and somebody else wrote between its guarded read and the proof.
func (r FamilyResult) Beaten() bool {
	var refused *iptables.RestoreError
	return r.otherWrote && !r.Outcome.Done() && !errors.As(r.Err, &refused)
}

// DoneExceptQuarantined reports whether everything that was written is proved, and rules were
// left out because what they lean on is missing, or because they are refused.
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
	Finding canary.Finding // of the guarded read that was acted on
	Mark    canary.Mark    // what is planted there now, as far as is known
	Section rules.Section  // what the last read showed; nil maps if unread
	Read    bool           // whether Section and Mark come from a read
	Absent  bool           // the last read showed that the table does not exist
	Table   *rules.Table   // what the last read showed, whole; nil if there was none
	Seen    *rules.Table   // what the guarded read showed that was acted on
	Lost    Lost
	Proved  bool
	// Unproved: it was written, and could not be read since. Mark is tried then.
	Unproved bool
	Skipped  []string // chains that their owner had restored
	// Replayed: rules were written, not marks alone. Then Quarantined are all
	// rules of the table that are held back, because what they lean on is
	// missing or they are refused, and Weakened those that were written
	// without a match that only counts.
	Replayed    bool
	Quarantined []QuarantinedRule
	Weakened    []QuarantinedRule
	// Refused is why a strict job left the table as it is; nil if it did not.
	Refused []Refusal
	// Gone is what stood when the table got its first marks, if another process took
	// them before the proof: no other read shows what it took with them.
	LostBeforeProof *rules.Section
	Policies        []string     // built-in policies that differ from the generation's
	Wrote           int          // chains whose content was written
	Placed          []rules.Jump // that were put back
	Changed         Change       // what the write did to protected rules, of a checked job

	// flushed: no mark at all was left standing, so that more may be gone than
	// the generation knows.
	flushed  bool
	restored bool           // saved rules stood in it
	last     canary.Finding // of the last read
}

// Heal puts back what the generation has and the kernel has not, all families
// by one restore, and proves it. Tables that lost nothing are not touched; a table
// that cannot be read is unknown and is not touched either.
//
// The error is ErrLocked or another reason for which no session could begin;
// then nothing was read or written.
func (r Replayer) Heal(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: heal, mayWriteUnguarded: true, writesRules: true, mayStage: true}, func(s iptables.Session, f rules.Family, result *FamilyResult) {
		// Also where some tables are missing yet: the next try does not touch those
		// that are proved now.
		if result.SyncNeeded = needsProxySync(*result); result.SyncNeeded {
			result.Aftercare = nudge(ctx, s, f, *result)
		}
	})
}

// Plant writes a canary and witnesses into every table that never had them,
// and touches nothing else. Marks that were lost stay lost: they are the
// evidence of a flush.
func (r Replayer) Plant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plantFirst, mayWriteUnguarded: true}, nil)
}

// Replant does that for tables that lost their marks, too: where nothing is
// replayed, the next flush must be noticed all the same.
func (r Replayer) Replant(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: plant, mayWriteUnguarded: true}, nil)
}

// Rotate gives intact tables a new nonce and their jumped chains a witness
// each. It is due after the generation moved: a file that was saved before
// carries the nonce of then, and restoring it is told from the present only
// if the nonce has changed since.
func (r Replayer) Rotate(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: rotate}, nil)
}

// Force makes the protected part of every table exactly what the generation
// says, whatever stands there: an operator asked for this generation by name.
// Tables of which it says nothing, because they could not be read when it was
// learned, are left alone.
func (r Replayer) Force(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: force, mayWriteUnguarded: true, writesRules: true, allTables: true, retriesRefused: true}, nil)
}

// Readmit puts back rules of job.Quarantine for which there is by now what they
// lean on, into chains that stand as they were left. A result is Skipped if there
// are none.
func (r Replayer) Readmit(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: readmit, writesRules: true, retriesRefused: true}, nil)
}

// Undouble takes away the copies of job.Doubled's jumps that stand beyond what the
// generation has.
func (r Replayer) RemoveDoubles(ctx context.Context, job Job) (Result, error) {
	return r.each(ctx, job, action{plan: removeDoubles}, nil)
}

// Remove takes every canary and witness out of the tables; with everything,
// the protected chains and their jumps too.
func (r Replayer) Remove(ctx context.Context, job Job, everything bool) (Result, error) {
	remove := func(task tableTask, _ canary.Nonce) *tablePlan {
		if task.seen.Err != nil || task.seen.Table == nil {
			return nil
		}
		if plan := composeRemoval(task, everything); !plan.script.Empty() {
			return &plan
		}
		return nil
	}
	return r.each(ctx, job, action{plan: remove, mayWriteUnguarded: true}, nil)
}

// each does act to every family of the job in one session, and then what comes
// after, when all families have had their turn.
func (r Replayer) each(ctx context.Context, job Job, do action, after func(iptables.Session, rules.Family, *FamilyResult)) (Result, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning a guarded write: %w", err)
	}
	result := run{r, s, job, do}.families(ctx)
	if after != nil {
		for _, f := range job.Families {
			fr := result[f]
			after(s, f, &fr)
			result[f] = fr
		}
	}
	if err := s.Close(); err != nil {
		return result, fmt.Errorf("ending a guarded write: %w", err)
	}
	return result, nil
}

// An action is what is done to a family's tables.
type action struct {
	// plan picks what to write to a table; nil means nothing.
	plan func(task tableTask, nonce canary.Nonce) *tablePlan
	// insists: rather write beside a busy writer than not at all.
	mayWriteUnguarded bool
	// stages: what decides about packets may be written before what translates them.
	mayStage bool
	// rules: it may write rules of the generation; all: of any table; retries:
	// also those that were refused before.
	writesRules, allTables, retriesRefused bool
}

// vacant reports whether the table does not exist, and nothing is wanted in it.
func (t tableTask) vacant() bool {
	section := t.want.Section
	return t.absent() && t.want.Mark.Nonce == "" && len(section.Chains)+len(section.Jumps) == 0
}

func heal(task tableTask, nonce canary.Nonce) *tablePlan {
	if !task.finding.Verdict.Loss() {
		return nil
	}
	plan := composeReplay(task, nonce)
	return &plan
}

func force(task tableTask, nonce canary.Nonce) *tablePlan {
	if task.seen.Err != nil || !task.known || task.vacant() {
		return nil
	}
	task.finding = canary.Finding{
		Verdict: canary.Replaced, MarkLost: true,
		Jumps: task.want.Section.Jumps,
	}
	plan := composeReplay(task, nonce)
	return &plan
}

func plant(task tableTask, nonce canary.Nonce) *tablePlan {
	unplanted := task.seen.Err == nil && task.want.Mark.Nonce == ""
	if !unplanted && !task.finding.MarkLost && len(task.finding.Witnesses) == 0 || task.leaveAbsent && task.vacant() {
		return nil
	}
	// Witnesses go where jumps stand now.
	task.want.Section.Jumps = task.seen.Section.Jumps
	plan := composePlant(task, nonce)
	return &plan
}

func plantFirst(task tableTask, nonce canary.Nonce) *tablePlan {
	if task.want.Mark.Nonce != "" {
		return nil
	}
	return plant(task, nonce)
}

func rotate(task tableTask, nonce canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed || task.want.Mark.Nonce == "" {
		return nil
	}
	task.want.Section.Jumps = task.seen.Section.Jumps
	plan := composeRotation(task, nonce)
	return &plan
}
