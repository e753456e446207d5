package reload

import (
	"errors"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// skipTable reports whether a refused restore is worth another try without the table that was
// refused. iptables-restore ends at the first refused table. If the kernel refuses a table as a
// whole, the tables behind it would wait for as long as that lasts. Reasons are a built-in chain at
// another hook than iptables', or too little memory. The next read shows which table it was.
func (r run) skipTable(t *familyRun) bool {
	var refused *iptables.RestoreError
	if len(t.plans) < 2 || !errors.As(t.answer.Err, &refused) || refused.Exit < 0 || refused.Reason == iptables.ReasonLock {
		return false
	}
	t.tableRefusal = t.answer.Err
	return true
}

// withoutSkipped returns the new plans without those of skipped tables. A table that was just
// refused is skipped, too: tables are written in order, so it is the first one that is still to be
// written.
func (t *familyRun) withoutSkipped(plans []tablePlan) []tablePlan {
	wasPlanned := func(p tablePlan) bool {
		return slices.ContainsFunc(t.plans, func(old tablePlan) bool { return old.table == p.table })
	}
	if i := slices.IndexFunc(plans, wasPlanned); t.tableRefusal != nil && i >= 0 {
		if t.skippedTables == nil {
			t.skippedTables = map[rules.TableName]error{}
		}
		t.skippedTables[plans[i].table] = t.tableRefusal
	}
	t.tableRefusal = nil
	return slices.DeleteFunc(plans, func(p tablePlan) bool { return t.skippedTables[p.table] != nil })
}

// skippedErr returns why tables were skipped, nil if none was.
func (t *familyRun) skippedErr() error {
	var errs []error
	for _, table := range protect.Tables() {
		if err := t.skippedTables[table]; err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
