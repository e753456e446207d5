package reload

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// withEarlier returns tr, with the writes and findings of an earlier try for the same loss, because
// needsProxySync judges all tries together.
func (tr TableResult) withEarlier(earlier TableResult) TableResult {
	tr.Wrote += earlier.Wrote
	tr.flushed, tr.restored = tr.flushed || earlier.flushed, tr.restored || earlier.restored
	return tr
}

// acceptEarlierWrites marks tables as proved that an earlier try wrote and this read shows in
// force. unproved has the results of tables that could not be read after their write.
func (t *familyRun) acceptEarlierWrites(unproved map[rules.TableName]TableResult) {
	for table, earlier := range unproved {
		now := t.result.Tables[table]
		if v := now.Finding.Verdict; v != canary.Intact && v != canary.Changed || now.Proved {
			continue
		}
		earlier.Proved, earlier.Unproved = true, false
		t.result.Tables[table] = earlier.reread(now)
	}
}

// reread returns the result of an earlier try, with a later read of the table. So the report
// keeps the rules that the earlier try wrote.
func (tr TableResult) reread(now TableResult) TableResult {
	tr.Mark, tr.last = now.Mark, now.last
	tr.Section, tr.Read, tr.Table, tr.Absent = now.Section, now.Read, now.Table, now.Absent
	return tr
}

// outcomeWithoutWrite returns the outcome of a family that needs no write, for plan. Tables
// that an earlier try wrote, and skipped tables, count. It may set t.result.Err.
func (t *familyRun) outcomeWithoutWrite() Outcome {
	outcome := Skipped
	for _, table := range protect.Tables() {
		tr := t.result.Tables[table]
		if !tr.Proved {
			continue
		}
		if outcome == Skipped {
			outcome = Proved
		}
		if len(tr.Quarantined) > 0 {
			outcome, t.result.Err = Partial, quarantinedError(t.family, table, tr.Quarantined)
		}
	}
	if err := t.skippedErr(); err != nil {
		t.result.Err = err
		if outcome == Skipped {
			return Failed
		}
		return Partial
	}
	return outcome
}

// quarantinedError says how many rules of a table are quarantined, and why.
func quarantinedError(f rules.Family, t rules.TableName, list []QuarantinedRule) error {
	return fmt.Errorf("%s %s: %d rules are quarantined: %s", f, t, len(list), reasonsOf(list))
}
