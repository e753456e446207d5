package reload

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unproved has what earlier tries of a loss wrote and could not read back. The next try that can
// read the table decides: what is in force then is proved, and counts as this replay's work. It is
// a value.
type unproved map[rules.TableID]TableResult

// after returns what is unproved after another try.
func (u unproved) after(result Result) unproved {
	next := unproved{}
	keep := func(f rules.Family, t rules.TableName, tr TableResult) {
		next[f.Table(t)] = tr
	}
	for id, tr := range u {
		f, t := id.Family, id.Name
		if !result[f].Tables[t].Proved {
			keep(f, t, tr)
		}
	}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if tr.Unproved {
				keep(f, t, tr.withEarlier(u[f.Table(t)]))
			}
		}
	}
	return next
}

// withEarlier returns tr with what an earlier try of the same loss wrote and found, because
// needsProxySync judges all tries together.
func (tr TableResult) withEarlier(earlier TableResult) TableResult {
	tr.Wrote += earlier.Wrote
	tr.flushed, tr.restored = tr.flushed || earlier.flushed, tr.restored || earlier.restored
	return tr
}

// acceptEarlierWrites marks as proved what an earlier try wrote and this read shows in force.
func (t *familyRun) acceptEarlierWrites(unproved map[rules.TableName]TableResult) {
	for table, earlier := range unproved {
		now := t.result.Tables[table]
		if v := now.Finding.Verdict; v != canary.Intact && v != canary.Changed || now.Proved {
			continue
		}
		earlier.Mark, earlier.Section, earlier.Read, earlier.last = now.Mark, now.Section, now.Read, now.last
		earlier.Proved, earlier.Unproved = true, false
		t.result.Tables[table] = earlier
	}
}

// outcomeWithoutWrite returns the outcome of a family to which nothing has to be written.
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
