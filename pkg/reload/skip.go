package reload

import (
	"errors"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
)

// A skippedTable says why a table is skipped: the error, and the refusals that a strict job
// reports.
type skippedTable struct {
	err     error
	refused []Refusal
}

// skipTable reports whether a refused restore is worth another try without the refused table.
// iptables-restore ends at the first refused table. If the kernel refuses a table as a whole, the
// tables behind it would wait for as long as that lasts. Reasons are too little memory, or a
// built-in chain at another hook than iptables uses. The next read shows which table was refused.
func (r run) skipTable(t *familyRun) bool {
	if len(t.plans) < 2 || refusalOf(t.answer.Err) == nil {
		return false
	}
	t.tableRefusal = t.answer.Err
	return true
}

// misfit returns why a plan must not be written: a step is for a built-in chain in which rules
// of iptables have no effect. misfits are from the guarded read. nil: it may be written.
func misfit(plan tablePlan, misfits map[iptables.Place]error) error {
	for place, why := range misfits {
		if place.Table == plan.table && slices.ContainsFunc(plan.script.Steps, func(s iptables.Step) bool { return s.Chain == place.Chain }) {
			return why
		}
	}
	return nil
}

// withoutSkipped returns the new plans without the plans of skipped tables. It also skips a table
// that was just refused: tables are written in order, so that is the first unwritten one.
func (t *familyRun) withoutSkipped(plans []tablePlan) []tablePlan {
	refused := refusalOf(t.tableRefusal)
	wasPlanned := func(p tablePlan) bool {
		if refused != nil && refused.Rule != nil {
			return p.table == refused.Rule.Name
		}
		return slices.ContainsFunc(t.plans, func(old tablePlan) bool { return old.table == p.table })
	}
	if i := slices.IndexFunc(plans, wasPlanned); t.tableRefusal != nil && i >= 0 {
		t.skipped[plans[i].table] = skippedTable{t.tableRefusal, refusedAsAWhole(t.tableRefusal)}
	}
	t.tableRefusal = nil
	return slices.DeleteFunc(plans, func(p tablePlan) bool { return t.skipped[p.table].err != nil || t.misfits[p.table] != nil })
}

// skippedErr returns why tables were skipped, nil if none was. prove and outcomeWithoutWrite
// put it into the family's result.
func (t *familyRun) skippedErr() error {
	var errs []error
	for _, table := range protect.Tables() {
		errs = append(errs, t.skipped[table].err, t.misfits[table])
	}
	return errors.Join(errs...)
}
