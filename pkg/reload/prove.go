package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// prove reads the family again, and decides for each table whether the plan is in force.
// families calls it after the last write. It sets the outcome and the error in t.result.
func (r run) prove(ctx context.Context, t *familyRun) {
	f, result, raced := t.family, &t.result, t.answer.Raced
	if t.stale() && !r.mayWriteUnguarded() {
		*result = FamilyResult{Outcome: Failed, Err: fmt.Errorf("%s: %w (tries: %d)", f, t.answer.Err, r.maxReads())}
		return
	}
	result.Err, result.otherWrote = errors.Join(t.answer.Err, t.skippedErr()), raced
	result.Direct, result.Detour = t.answer.Direct, t.answer.Detour
	result.Written, result.Kernel = t.answer.At, t.answer.Kernel
	after, err := r.session.Read(ctx, f)
	if err != nil {
		result.Outcome, result.Err = Failed, errors.Join(t.answer.Err, fmt.Errorf("reading %s for the proof: %w", f, err))
		for _, plan := range t.plans { // its marks, and the rest, may have been written
			tr := plan.account(result.Tables[plan.table])
			tr.Mark, tr.Unproved = tr.Mark.Trying(plan.want.Mark), true
			result.Tables[plan.table] = tr
		}
		return
	}
	// After a refusal canaryd does not know which writes followed the guarded read.
	result.otherWrote, result.Digest = raced || after.Moved || refusalOf(t.answer.Err) != nil, after.Digest
	result.Proof = after.Digest
	result.overtaken, result.OnDemand = t.overtaken, OnDemandOf(after)
	if result.otherWrote {
		// Another process may have changed a table that was not replayed and that the proof does
		// not judge. Without a digest the loop examines all tables.
		result.Digest = 0
	}
	result.proxyCanary = tablesWithProxy(after)
	proved := 0
	for _, plan := range t.plans {
		if r.proveOne(t, plan, after) {
			proved++
		}
	}
	for _, table := range protect.Tables() { // tables of an earlier try count, too
		if tr := result.Tables[table]; tr.Proved && len(tr.Quarantined) > 0 && result.Err == nil {
			result.Err = quarantinedError(f, table, tr.Quarantined)
		}
	}
	switch {
	case proved == len(t.plans) && result.Err == nil && raced:
		result.Outcome = Raced
	case proved == len(t.plans) && result.Err == nil:
		result.Outcome = Proved
	case proved > 0:
		result.Outcome = Partial
	default:
		result.Outcome = Failed
	}
}

// ErrUnproved means that a read after a write does not show the written rules.
var ErrUnproved = errors.New("is not as it was written")

// proveOne records the read of one planned table in the result, and reports whether the plan is
// in force. after is the read after the write. prove counts the proved tables for the outcome.
func (r run) proveOne(t *familyRun, plan tablePlan, after iptables.Snapshot) bool {
	f, result, wrote := t.family, &t.result, t.answer.Err == nil
	tr := plan.account(result.Tables[plan.table])
	seen := Examiner{Protection: r.Protection}.seenOf(after, plan.table, slices.Concat(r.job.Quarantine[f.Table(plan.table)], plan.quarantined))
	planted := tr.Section
	if seen.Err == nil {
		tr.Section, tr.Read, tr.Table, tr.Absent = seen.Section, true, seen.Table, seen.Table == nil
	}
	if !wrote {
		seen.Before = tr.last // perhaps nothing changed
	}
	finding := canary.Judge(plan.want, seen)
	tr.last = finding
	// After a refusal it is unknown whether another process wrote, so no difference is ascribed
	// to one.
	err := proveTable(plan, seen, finding, result.otherWrote && wrote)
	tr.Landed = err != nil && wrote && seen.Err == nil && !finding.MarkLost
	switch {
	case err == nil:
		tr.Proved, tr.Mark = true, plan.want.Mark
		tr = tr.withEarlier(r.job.Memory.unproved[f.Table(plan.table)]).after(t.earlier[plan.table])
	case seen.Err != nil && plan.want.Mark.Nonce != "":
		tr.Mark, tr.Unproved = tr.Mark.Trying(plan.want.Mark), true
	case seen.Err == nil && wrote && plan.want.Mark.Nonce != "":
		// The write succeeded, so the mark was planted. If the former mark is there, another
		// process has restored a file that was saved before.
		tr.Mark = plan.want.Mark
	case seen.Err == nil && seen.Table.Chain(r.Canary) != nil:
		tr.Mark = tr.Mark.Trying(plan.want.Mark).Resolve(r.Canary, seen.Table)
	}
	if finding.Verdict.Loss() && wrote && tr.Finding.Verdict == canary.Unknown {
		tr.LostBeforeProof = &planted
	}
	if err != nil && result.Err == nil {
		result.Err = fmt.Errorf("%s %s %w: %w", f, plan.table, ErrUnproved, err)
	}
	if err != nil && wrote && !result.otherWrote && plan.replay && seen.Err == nil && !finding.MarkLost {
		tr.misread, tr.misreadRules = plan.misreadBy(seen.Table, r.job.Claimed)
	}
	if err != nil && r.job.Strict {
		tr.Refused = refusedAsAWhole(t.answer.Err)
	}
	if len(plan.quarantined) > 0 && result.Err == nil {
		result.Err = quarantinedError(f, plan.table, plan.quarantined)
	}
	result.Tables[plan.table] = tr
	return err == nil
}

// account returns a table's result, with the changes of the plan, which are not proved yet. It
// is called before the proof, and also if the proof fails.
func (p tablePlan) account(tr TableResult) TableResult {
	tr.Proved, tr.Landed = false, false
	tr.Skipped, tr.Wrote, tr.Placed, tr.Changed = p.skipped, len(p.wrote), p.jumps, tr.Changed.and(p.change)
	tr.Replayed, tr.Quarantined, tr.Weakened, tr.Meant = p.replay, p.quarantined, p.weakened, p.meant
	return tr
}

// proveTable returns nil if the table is as planned; else the error says which part is not. If
// another process wrote since the guarded read (foreign), a chain that still holds rules may
// differ. Even then, marks must be in force, and no loss may be found.
func proveTable(plan tablePlan, seen canary.Seen, finding canary.Finding, foreign bool) error {
	if plan.want.Mark.Nonce == "" {
		return proveRemoved(plan, seen)
	}
	if finding.Verdict == canary.Unknown {
		return fmt.Errorf("it could not be read: %w", finding.Err)
	}
	if finding.Verdict.Loss() {
		return fmt.Errorf("it is %s", finding.Verdict)
	}
	for _, c := range slices.Concat(plan.wrote, plan.merged) {
		standing := seen.Table.Chain(c.Name)
		switch {
		case standing != nil && rules.EqualRules(standing.Rules, c.Rules):
		case foreign && (standing == nil || len(standing.Rules) > 0):
		case standing == nil:
			return fmt.Errorf("chain %s is missing", c.Name)
		default:
			return fmt.Errorf("chain %s holds %d rules other than the %d written", c.Name, len(standing.Rules), len(c.Rules))
		}
	}
	for _, h := range plan.jumps {
		if !stands(seen.Table, h) && !foreign {
			return fmt.Errorf("jump %s is missing", h)
		}
	}
	for _, name := range plan.removed {
		if seen.Table.Chain(name) != nil && !foreign {
			return fmt.Errorf("chain %s is still there", name)
		}
	}
	return nil
}

// proveRemoved returns nil if the marks and the removed chains are gone. It is the proof of a
// plan whose table keeps no marks.
func proveRemoved(plan tablePlan, seen canary.Seen) error {
	if seen.Err != nil {
		return fmt.Errorf("it could not be read: %w", seen.Err)
	}
	for _, name := range append([]string{plan.want.CanaryChain}, plan.removed...) {
		if seen.Table.Chain(name) != nil {
			return fmt.Errorf("chain %s is still there", name)
		}
	}
	return nil
}
