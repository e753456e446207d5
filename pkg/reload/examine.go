package reload

import (
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Examiner judges full reads.
type Examiner struct {
	Canary     string // the canary chain's name
	Protection rules.Protection
	// Extracted holds the Extractions of the last reads by the same Protection. With it an
	// Extraction costs as much as the changes. Examine changes it; nil: none are kept.
	Extracted map[rules.TableID]rules.Extraction
}

// Examined is the result of one table's read, with the judge's finding.
type Examined struct {
	Finding canary.Finding
	Section rules.Section // the protected part; empty if the table could not be read
	Mark    canary.Mark   // the mark that the judge looked for, with tried nonces resolved
	Lost    Lost
	Table   *rules.Table // the complete table
	Seen    uint64       // the digest of the read
	Absent  bool         // the table does not exist
}

// Examine judges a snapshot by the job's rules for its family. The daemon calls it after a full
// read: by the findings it learns the rules, or begins a replay.
func (e Examiner) Examine(snapshot iptables.Snapshot, job Job) map[rules.TableName]Examined {
	found := map[rules.TableName]Examined{}
	for _, task := range e.tasks(snapshot, job) {
		x := Examined{Finding: task.finding, Section: task.seen.Section, Mark: task.want.Mark, Table: task.seen.Table, Seen: snapshot.Digest, Absent: task.absent()}
		if task.finding.Verdict.Loss() {
			x.Lost = countLost(task)
		}
		found[task.table] = x
	}
	return found
}

// tasks judges each guarded table of a snapshot, for Examine and for the plans of a replay. It
// does not expect quarantined rules in a table.
func (e Examiner) tasks(snapshot iptables.Snapshot, job Job) []tableTask {
	f := snapshot.Family
	tasks := make([]tableTask, 0, protect.TableCount)
	var purged func(id rules.TableID, chain, target string) bool
	if job.Purged != nil {
		purged = job.Purged()
	}
	for _, table := range protect.Tables() {
		leaveAbsent := job.LeaveAbsent != nil && job.LeaveAbsent(f, table)
		list := job.Quarantine[f.Table(table)]
		seen := e.seenOf(snapshot, table, list)
		seen.Quiet, seen.Before = job.Quiet[f], job.Memory.Finding(f.Table(table))
		if job.Over != nil {
			seen.Over = func(h rules.Jump) bool { return job.Over(f.Table(table), h) }
		}
		section, known := job.Generation[f.Table(table)]
		want := canary.Wanted{
			CanaryChain: e.Canary,
			Mark:        job.Marks[f.Table(table)],
			Section:     section,
			OnDemand:    protect.OnDemand(table) && (leaveAbsent || job.LeaveAbsent == nil), // else rules are declared for it
			Complete:    &section,
			Claimed:     job.Claimed,
			Piecewise:   e.Protection.Piecewise,
		}
		if table == rules.Nat {
			want.Robbed = job.Robbed[f]
		}
		if purged != nil {
			want.Purged = func(chain, target string) bool { return purged(f.Table(table), chain, target) }
		}
		if seen.Err == nil {
			want.Mark = want.Mark.Resolve(e.Canary, seen.Table)
		}
		judged := want
		judged.Section = without(section, list)
		var left misread
		if seen.Err == nil {
			left = job.Memory.misread[f.Table(table)].standing(seen.Table)
		}
		finding := left.judge(canary.Judge(judged, seen))
		if finding.Unmarked {
			want.Mark = canary.Mark{}
		}
		tasks = append(tasks, tableTask{
			table: table, want: want, known: known, seen: seen, finding: finding, quarantined: list, misread: left,
			leaveAbsent: leaveAbsent,
		})
	}
	return tasks
}

// absent reports whether the read showed that the table does not exist.
func (t tableTask) absent() bool { return t.seen.Err == nil && t.seen.Table == nil }

// OnDemandOf returns the tables of a snapshot that are guarded only while they hold something
// to guard: raw and security. A missing table is nil, and a table that could not be read has no
// entry. While these tables have no marks, the daemon compares them with the read before, and
// reports large removals.
func OnDemandOf(snapshot iptables.Snapshot) map[rules.TableName]*rules.Table {
	tables := map[rules.TableName]*rules.Table{}
	for _, t := range protect.Tables() {
		if protect.OnDemand(t) && snapshot.Unreadable[t] == nil {
			tables[t] = snapshot.Tables[t]
		}
	}
	return tables
}

// seenOf returns one table of a snapshot in the form that the judge takes, for the examination
// and the proof. The section has the chains of other owners to which only quarantined rules
// lead: their owners' changes count meanwhile.
func (e Examiner) seenOf(snapshot iptables.Snapshot, table rules.TableName, quarantined []QuarantinedRule) canary.Seen {
	if err := snapshot.Unreadable[table]; err != nil {
		return canary.Seen{Err: err}
	}
	t, id := snapshot.Tables[table], snapshot.Family.Table(table)
	missing := make([]rules.Rule, len(quarantined))
	for i, h := range quarantined {
		missing[i] = h.Rule
	}
	x := e.Protection.ExtractNext(e.Extracted[id], t, canary.IsMark, missing)
	if e.Extracted != nil {
		e.Extracted[id] = x
	}
	return canary.Seen{Table: t, Section: x.Section}
}
