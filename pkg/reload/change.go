package reload

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ErrNotAgreed means that Job.Check refused a write, and nothing more was written.
var ErrNotAgreed = errors.New("this would remove protected rules that were not agreed to")

// checkedTries is how often a checked job reads and plans while other processes keep writing. A
// checked job never writes without a guard, so it tries more often than others.
const checkedTries = 20

// A Change is the effect of a write on the protected rules of one table. Rules are compared by
// their meaning.
type Change struct {
	Added, Removed Part
	Reordered      []string // chains that hold the same rules in another order
}

// A Part is one side of a Change: the added or the removed chains and rules.
type Part struct {
	Chains []string
	Rules  []rules.Jump // rules of protected chains, and jumps into them, each with its chain
}

// Changes are the changes of several tables.
type Changes map[rules.TableID]Change

// Empty reports whether the part holds no chain and no rule.
func (p Part) Empty() bool { return len(p.Chains)+len(p.Rules) == 0 }

// Empty reports whether the write changes no protected rule.
func (c Change) Empty() bool {
	return c.Added.Empty() && c.Removed.Empty() && len(c.Reordered) == 0
}

func (c Change) and(next Change) Change {
	return Change{c.Added.and(next.Added), c.Removed.and(next.Removed), slices.Concat(c.Reordered, next.Reordered)}
}

func (p Part) and(next Part) Part {
	return Part{slices.Concat(p.Chains, next.Chains), slices.Concat(p.Rules, next.Rules)}
}

// Digest identifies the content of the part; it is "" for the empty part. A preview shows it to
// the operator, whose Agreement names it.
func (p Part) Digest() string {
	if p.Empty() {
		return ""
	}
	var lines []string
	for _, name := range p.Chains {
		lines = append(lines, ":"+name)
	}
	for _, r := range p.Rules {
		lines = append(lines, r.String())
	}
	slices.Sort(lines)
	sum := sha256.Sum256([]byte(strings.Join(lines, "\x00") + "\x00"))
	return hex.EncodeToString(sum[:])[:24]
}

// An Agreement names the removals that an operator agreed to: for each table, the Digest of the
// Change.Removed that the operator saw. It is a value; nil agrees to no removal.
type Agreement map[rules.TableID]string

// MarshalJSON writes digests by family and table.
func (a Agreement) MarshalJSON() ([]byte, error) { return tableid.Marshal(a) }

// UnmarshalJSON reads the text of MarshalJSON.
func (a *Agreement) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, a) }

// Check returns ErrNotAgreed with the first table from which the changes remove chains or rules
// without the operator's agreement. A restore on request passes it as Job.Check.
func (a Agreement) Check(c Changes) error {
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			removed := c[f.Table(t)].Removed
			if !removed.Empty() && removed.Digest() != a[f.Table(t)] {
				return fmt.Errorf("%w: %s %s", ErrNotAgreed, f, t)
			}
		}
	}
	return nil
}

// A Preview is the effect that a job would have.
type Preview struct {
	Changes Changes
	// Unread says why a table, or a whole family, could not be read and so stays as it is.
	Unread []error
}

// PreviewHeal returns the changes that Heal would make. It writes nothing.
func (r Replayer) PreviewHeal(ctx context.Context, job Job) (Preview, error) {
	return r.preview(ctx, job, action{plan: heal, writesRules: true})
}

// PreviewForce returns the changes that Force would make. It writes nothing.
func (r Replayer) PreviewForce(ctx context.Context, job Job) (Preview, error) {
	return r.preview(ctx, job, action{plan: force, writesRules: true, allTables: true, retriesRefused: true})
}

// preview plans a job under guard and ends the session without a write, for PreviewHeal and
// PreviewForce. An error means that the session failed; unreadable tables are in Unread.
func (r Replayer) preview(ctx context.Context, job Job, do action) (Preview, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return Preview{}, fmt.Errorf("beginning a guarded read: %w", err)
	}
	r.Supplier = nil // a Supplier would create ipsets
	p := Preview{Changes: Changes{}}
	for _, f := range job.Families {
		t := newFamilyRun(f, job.Memory)
		run{r, s, job, do}.plan(ctx, t)
		if t.result.Tables == nil {
			p.Unread = append(p.Unread, t.result.Err)
		}
		for _, table := range protect.Tables() {
			if tr, ok := t.result.Tables[table]; ok && !tr.Read {
				p.Unread = append(p.Unread, fmt.Errorf("%s %s: %w", f, table, tr.Finding.Err))
			}
		}
		p.Changes.add(t)
	}
	if err := s.Close(); err != nil {
		return p, fmt.Errorf("ending a guarded read: %w", err)
	}
	return p, nil
}

// add adds the changes of a family's plans, and records them in the plans for the result.
// preview and checkRefuses call it.
func (c Changes) add(t *familyRun) {
	for i := range t.plans {
		p := &t.plans[i]
		if p.change.Empty() {
			p.change = p.changes()
		}
		c[t.family.Table(p.table)] = p.change
	}
}

// checkRefuses calls Job.Check for the next write. If the check refuses it, all families end,
// and families returns. Each try calls it again: another process may have written since the
// last try, and the plan's changes may differ.
func (r run) checkRefuses(runs []*familyRun, end func(*familyRun)) bool {
	if r.job.Check == nil || len(runs) == 0 {
		return false
	}
	changes := Changes{}
	for _, t := range runs {
		changes.add(t)
	}
	err := r.job.Check(changes)
	if err == nil {
		return false
	}
	for _, t := range runs {
		t.endRefused(err)
		end(t)
	}
	return true
}

// endRefused ends a family whose write the check refused with this error. Tables that an
// earlier try wrote and proved stay in the result. Digest 0 has the daemon examine all tables
// again.
func (t *familyRun) endRefused(err error) {
	maps.DeleteFunc(t.result.Tables, func(_ rules.TableName, tr TableResult) bool { return !tr.Proved })
	outcome := Failed
	if len(t.result.Tables) > 0 {
		outcome = Partial
	}
	t.result.Outcome, t.result.Err, t.result.Digest = outcome, err, 0
}

// mayWriteUnguarded reports whether a family that was stale in every try is written without a
// guard. A checked job never is, because the check would miss the other process's writes.
func (r run) mayWriteUnguarded() bool { return r.action.mayWriteUnguarded && r.job.Check == nil }

// maxReads is how often a family is read when other processes write between read and write.
// After that it is written without a guard, or its replay fails.
func (r run) maxReads() int {
	switch {
	case r.action.oneTry:
		return 1
	case r.job.Check != nil:
		return checkedTries
	}
	return staleReads
}

// changes returns the protected rules that the plan adds, removes and reorders. A preview shows
// them, and Job.Check decides about them.
func (p *tablePlan) changes() Change {
	var c Change
	for _, chain := range slices.Concat(p.wrote, p.merged) {
		standing := p.seen.Chain(chain.Name)
		if standing == nil {
			c.Added.Chains = append(c.Added.Chains, chain.Name)
			c.Added.Rules = appendRules(c.Added.Rules, chain.Name, chain.Rules)
			continue
		}
		gone, fresh := rules.OnlyIn(standing.Rules, chain.Rules), rules.OnlyIn(chain.Rules, standing.Rules)
		c.Removed.Rules = appendRules(c.Removed.Rules, chain.Name, gone)
		c.Added.Rules = appendRules(c.Added.Rules, chain.Name, fresh)
		if len(gone)+len(fresh) == 0 && !rules.EqualRules(standing.Rules, chain.Rules) {
			c.Reordered = append(c.Reordered, chain.Name)
		}
	}
	for _, name := range p.removed {
		c.Removed.Chains = append(c.Removed.Chains, name)
		c.Removed.Rules = appendRules(c.Removed.Rules, name, p.seen.Chain(name).Rules)
	}
	for _, chain := range rules.BuiltinChains(p.table) {
		gone, fresh := jumpRulesIn(p.jumpsTaken, chain), jumpRulesIn(p.jumps, chain)
		c.Removed.Rules = appendRules(c.Removed.Rules, chain, rules.OnlyIn(gone, fresh))
		c.Added.Rules = appendRules(c.Added.Rules, chain, rules.OnlyIn(fresh, gone))
	}
	return c
}

// appendRules appends rules to list with their chain. It leaves out canaryd's own marks.
func appendRules(list []rules.Jump, chain string, add []rules.Rule) []rules.Jump {
	for _, r := range add {
		if !canary.IsMark(r) {
			list = append(list, rules.Jump{Chain: chain, Rule: r})
		}
	}
	return list
}

// jumpRulesIn returns the rules of the jumps in one chain, in the order of the list.
func jumpRulesIn(list []rules.Jump, chain string) []rules.Rule {
	var of []rules.Rule
	for _, h := range list {
		if h.Chain == chain {
			of = append(of, h.Rule)
		}
	}
	return of
}
