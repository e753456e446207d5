package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Refusal is a declared rule that iptables or the kernel refuses.
type Refusal struct {
	Chain string     // of a jump: the built-in chain; empty if no single rule is the cause
	Rule  rules.Rule // the zero value if no single rule is the cause
	// Reason is the answer of iptables or the kernel. It may quote the rule.
	Reason string
	Class  iptables.Reason
}

// Refusals are the refusals of each table. It is a value.
type Refusals map[rules.TableID][]Refusal

// Count returns how many refusals there are.
func (r Refusals) Count() int { return countAll(r) }

// countAll returns how many elements the lists of all tables have, for both Count methods.
func countAll[T any](lists map[rules.TableID][]T) int {
	n := 0
	for _, list := range lists {
		n += len(list)
	}
	return n
}

// After returns the refusals after another try. Tables that the try did not reach keep their
// refusals. The daemon passes them to the next job, and shows them in its status.
func (r Refusals) After(result Result) Refusals {
	next := Refusals{}
	for _, f := range rules.Families() {
		fr, tried := result[f]
		for _, t := range protect.Tables() {
			tr, list := fr.Tables[t], r[f.Table(t)]
			switch {
			case tr.Refused != nil:
				list = tr.Refused
			case tried && (tr.Proved || tr.Read && !tr.Finding.Verdict.Loss()):
				continue
			}
			if len(list) > 0 {
				next[f.Table(t)] = list
			}
		}
	}
	return next
}

// skipRefused skips a table if a trial found that a declared rule of it is refused. An operator
// means a table's rules together: half a firewall may let in packets that the complete one keeps
// out. Learned rules that are refused are quarantined, as always.
func (t *familyRun) skipRefused(plan tablePlan, trial trial, claimed func(chain string) bool) {
	list := refusalsIn(plan, trial, claimed)
	if len(list) == 0 {
		return
	}
	t.skipped[plan.table] = skippedTable{refused: list, err: fmt.Errorf(
		"%s %s stays as it is, because %d of the rules declared for it are refused: %s",
		t.family, plan.table, len(list), list[0].Reason)}
}

// refusalsIn returns the claimed rules of a plan that its trial found refused. If there are
// any, a strict job skips the table. If claimed is nil, all rules count as claimed.
func refusalsIn(plan tablePlan, trial trial, claimed func(chain string) bool) []Refusal {
	if claimed == nil {
		claimed = func(string) bool { return true }
	}
	var list []Refusal
	note := func(chain string, r rules.Rule) {
		if reason, bad := trial.bad[r.Key()]; bad {
			list = append(list, Refusal{Chain: chain, Rule: r, Reason: reason, Class: classOf(trial.errs[r.Key()])})
		}
	}
	for _, c := range slices.Concat(plan.wrote, plan.merged) {
		for _, r := range c.Rules {
			if claimed(c.Name) {
				note(c.Name, r)
			}
		}
	}
	for _, h := range plan.jumps {
		if claimed(h.Into()) {
			note(h.Chain, h.Rule)
		}
	}
	return list
}

// Try checks whether the kernel takes the rules of a generation, and returns the refused rules.
// It writes them to a chain that nothing jumps to, and deletes that chain. Only the named
// families are tried. The command that checks declared rules calls it.
func (r Replayer) Try(ctx context.Context, g rules.Generation, families ...rules.Family) (refused Refusals, err error) {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning a trial: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	result := Result{}
	for _, f := range families {
		snapshot, err := s.Read(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", f, err)
		}
		tables := map[rules.TableName]TableResult{}
		for _, table := range protect.Tables() {
			section := g[f.Table(table)]
			plan := tablePlan{table: table, wrote: section.Chains, jumps: section.Jumps, seen: snapshot.Tables[table]}
			trial := newTrial(s, f, plan)
			if err := trial.run(ctx); err != nil {
				return nil, fmt.Errorf("trying the rules of %s %s: %w", f, table, err)
			}
			tables[table] = TableResult{Refused: refusalsIn(plan, trial, nil)}
		}
		result[f] = FamilyResult{Tables: tables}
	}
	return Refusals{}.After(result), nil
}

// reportSkipped records in the result why a strict job skips tables. plan calls it after it has
// made a new result.
func (t *familyRun) reportSkipped() {
	for table, skipped := range t.skipped {
		tr := t.result.Tables[table]
		tr.Refused = skipped.refused
		t.result.Tables[table] = tr
	}
}

// refusalOf returns the refusal in an error; nil if there is none. Only after a refusal are the
// rules searched for its cause. A lock of another process is no refusal: the kernel did not see
// the rules.
func refusalOf(err error) *iptables.RestoreError {
	refused, ok := errors.AsType[*iptables.RestoreError](err)
	if !ok || refused.Exit < 0 || refused.Reason == iptables.ReasonLock {
		return nil
	}
	return refused
}

// refusedAsAWhole returns the refusal of a table for which no single rule is the cause, for
// TableResult.Refused; nil if the error is no refusal.
func refusedAsAWhole(err error) []Refusal {
	if refused := refusalOf(err); refused != nil {
		return []Refusal{{Reason: err.Error(), Class: refused.Reason}}
	}
	return nil
}

// classOf returns the class of the error for which a rule is refused, for Refusal.Class;
// ReasonOther if it is no refusal of iptables.
func classOf(err error) iptables.Reason {
	if refused, ok := errors.AsType[*iptables.RestoreError](err); ok {
		return refused.Reason
	}
	return iptables.ReasonOther
}
