package reload

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// ErrNotAgreed: a write was not made because Job.Check refused what it would change.
var ErrNotAgreed = errors.New("this would remove protected rules that were not agreed to")

// checkedTries is how often a checked job is read and planned while other processes write
// in between. It is never written without a guard, so it tries more often than others.
const checkedTries = 20

// A Change is what a write does to the protected rules of one table. Rules are compared by
// their meaning.
type Change struct {
	Added, Removed Part
	Reordered      []string // chains that hold the same rules in another order
}

// A Part is one side of a Change.
type Part struct {
	Chains []string
	Rules  []rules.Jump // with their chains: those of protected chains, and jumps into them
}

// Changes are those of several tables.
type Changes map[rules.TableID]Change

// Empty reports whether nothing is on this side.
func (p Part) Empty() bool { return len(p.Chains)+len(p.Rules) == 0 }

// Empty reports whether the write changes no protected rule.
func (c Change) Empty() bool {
	return c.Added.Empty() && c.Removed.Empty() && len(c.Reordered) == 0
}

// and returns both changes, one after the other.
func (c Change) and(next Change) Change {
	return Change{c.Added.and(next.Added), c.Removed.and(next.Removed), slices.Concat(c.Reordered, next.Reordered)}
}

func (p Part) and(next Part) Part {
	return Part{slices.Concat(p.Chains, next.Chains), slices.Concat(p.Rules, next.Rules)}
}

// Digest identifies the part by its content; "" is the empty part.
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
	h := sha256.New()
	for _, line := range lines {
		_, _ = h.Write(append([]byte(line), 0))
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

// An Agreement names the removals that an operator agreed to: for each table the Digest of
// what Change.Removed held when it was shown. It is a value; nil agrees to no removal.
type Agreement map[rules.TableID]string

// MarshalJSON writes digests by family and table.
func (a Agreement) MarshalJSON() ([]byte, error) { return tableid.Marshal(a) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (a *Agreement) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, a) }

// Check returns ErrNotAgreed, with the first such table, if the changes remove something
// that was not agreed to.
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

// A Preview is what a job would do.
type Preview struct {
	Changes Changes
	// Unread says why a table, or a whole family, is left as it is.
	Unread []error
}

// PreviewHeal returns what Heal would change. It writes nothing.
func (r Replayer) PreviewHeal(ctx context.Context, job Job) (Preview, error) {
	return r.preview(ctx, job, action{plan: heal, writesRules: true})
}

// PreviewForce returns what Force would change. It writes nothing.
func (r Replayer) PreviewForce(ctx context.Context, job Job) (Preview, error) {
	return r.preview(ctx, job, action{plan: force, writesRules: true, allTables: true, retriesRefused: true})
}

// preview plans a job under guard and lets go of it.
func (r Replayer) preview(ctx context.Context, job Job, do action) (Preview, error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return Preview{}, fmt.Errorf("beginning a guarded read: %w", err)
	}
	r.Supplier = nil // it would make ipsets
	p := Preview{Changes: Changes{}}
	for _, f := range job.Families {
		t := &familyRun{family: f, memory: job.Memory}
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

// add notes what a turn's plans change, in the plans as well.
func (c Changes) add(t *familyRun) {
	for i := range t.plans {
		p := &t.plans[i]
		if p.change.Empty() {
			p.change = p.changes()
		}
		c[t.family.Table(p.table)] = p.change
	}
}

// refuses asks the job's check for what is about to be written, and ends the turns if it
// refuses that. It is asked again for each try: the check holds for what is written, and
// another process may have written since the last one.
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

// refuse ends a turn whose write was not allowed. What an earlier try of it wrote and
// proved stays in the result.
func (t *familyRun) endRefused(err error) {
	for table, tr := range t.result.Tables {
		if !tr.Proved {
			delete(t.result.Tables, table)
		}
	}
	outcome := Failed
	if len(t.result.Tables) > 0 {
		outcome = Partial
	}
	t.result.Outcome, t.result.Err, t.result.Digest = outcome, err, 0
}

// insists reports whether what was found stale again and again is written all the same. A
// checked job never is: what another process wrote since would go unseen.
func (r run) mayWriteUnguarded() bool { return r.action.mayWriteUnguarded && r.job.Check == nil }

// tries is how often a family is read because another process wrote between read and write.
func (r run) maxReads() int {
	if r.job.Check != nil {
		return checkedTries
	}
	return staleReads
}

// changes returns what the plan does to the protected rules that it was made for.
func (p *tablePlan) changes() Change {
	var c Change
	for _, chain := range slices.Concat(p.wrote, p.merged) {
		standing := p.seen.Chain(chain.Name)
		if standing == nil {
			c.Added.Chains = append(c.Added.Chains, chain.Name)
			c.Added.Rules = appendRules(c.Added.Rules, chain.Name, chain.Rules)
			continue
		}
		gone, fresh := rulesOnlyIn(standing.Rules, chain.Rules), rulesOnlyIn(chain.Rules, standing.Rules)
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
		c.Removed.Rules = appendRules(c.Removed.Rules, chain, rulesOnlyIn(gone, fresh))
		c.Added.Rules = appendRules(c.Added.Rules, chain, rulesOnlyIn(fresh, gone))
	}
	return c
}

func appendRules(list []rules.Jump, chain string, add []rules.Rule) []rules.Jump {
	for _, r := range add {
		if !canary.IsMark(r) {
			list = append(list, rules.Jump{Chain: chain, Rule: r})
		}
	}
	return list
}

func jumpRulesIn(list []rules.Jump, chain string) []rules.Rule {
	var of []rules.Rule
	for _, h := range list {
		if h.Chain == chain {
			of = append(of, h.Rule)
		}
	}
	return of
}

// beyond returns the rules of a that b does not have, as often as it lacks them.
func rulesOnlyIn(a, b []rules.Rule) []rules.Rule {
	if len(a) == 0 || rules.EqualRules(a, b) {
		return nil
	}
	have := map[string]int{}
	for _, r := range b {
		have[r.Meaning()]++
	}
	var list []rules.Rule
	for _, r := range a {
		if m := r.Meaning(); have[m] > 0 {
			have[m]--
			continue
		}
		list = append(list, r)
	}
	return list
}
