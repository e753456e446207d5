package reload

import (
	"errors"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// skipTable reports whether a restore was refused that is worth trying without the
// table that it was refused for. iptables-restore ends at the first table that is
// refused: without that, one which is refused as a whole (a built-in chain with
// another hook than iptables', no memory for all its rules) would keep those behind
// it out for as long as it lasts. Which one it was, the next read shows.
func (r run) skipTable(t *familyRun) bool {
	var refused *iptables.RestoreError
	if len(t.plans) < 2 || !errors.As(t.answer.Err, &refused) || refused.Exit < 0 || refused.Reason == iptables.ReasonLock {
		return false
	}
	t.tableRefusal = t.answer.Err
	return true
}

// withoutSkipped returns the new plans without those of tables that are skipped,
// and of the one to blame: tables are written in order, so it is the first that is
// still to be written.
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
