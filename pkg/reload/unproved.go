package reload

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unproved is what was written to put a loss right and could not be read back, by
// family and table. The next try that can read it decides: what is in force then
// is proved, and all that follows a replay follows it. It is a value.
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

// owing returns tr with what an earlier try of the same loss left to be done
// once it is proved.
func (tr TableResult) withEarlier(earlier TableResult) TableResult {
	tr.Wrote += earlier.Wrote
	tr.flushed, tr.restored = tr.flushed || earlier.flushed, tr.restored || earlier.restored
	return tr
}

// settle takes what an earlier try wrote, and this read shows to be in force, for
// proved.
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

// settled is the outcome of a family in which nothing is left to write.
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

func quarantinedError(f rules.Family, t rules.TableName, list []QuarantinedRule) error {
	return fmt.Errorf("%s %s: %d rules were left out: %s", f, t, len(list), reasonsOf(list))
}
