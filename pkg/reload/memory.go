package reload

import (
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Memory has the findings of the reads and tries so far for one loss. The caller keeps it while
// the loss lasts, and passes it with each Job. It is a value; the zero Memory is for a new loss.
type Memory struct {
	// found has the finding of the last read of each table. Later reads cannot show all of it: see
	// canary.Seen.
	found map[rules.TableID]canary.Finding
	// unproved has the tables that earlier tries wrote and could not read back. The next try that
	// can read the table decides: rules in force then are proved, and count as this replay's work.
	unproved map[rules.TableID]TableResult
	// misread has the rules that earlier tries wrote otherwise than planned.
	misread map[rules.TableID]misread
}

// With returns the memory after another read of a table, for the next judgment. A failed read
// adds nothing.
func (m Memory) With(id rules.TableID, finding canary.Finding) Memory {
	if finding.Verdict != canary.Unknown {
		m.found = tableid.With(m.found, id, finding)
	}
	return m
}

// After returns the memory after a replay. The next Job for the same loss gets it.
func (m Memory) After(result Result) Memory {
	next := map[rules.TableID]TableResult{}
	for id, tr := range m.unproved {
		if !result[id.Family].Tables[id.Name].Proved {
			next[id] = tr
		}
	}
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if tr.Unproved {
				next[f.Table(t)] = tr.withEarlier(m.unproved[f.Table(t)])
			}
		}
	}
	m.unproved = next
	for f, fr := range result {
		for t, tr := range fr.Tables {
			switch {
			case tr.Proved:
				m.misread = tableid.With(m.misread, f.Table(t), misread{})
			case !tr.misread.empty():
				m.misread = tableid.With(m.misread, f.Table(t), tr.misread)
			}
		}
	}
	return m.AfterPlanting(result)
}

// AfterPlanting returns the memory after a write of marks alone. A table that was written and not
// read since has no finding: rules that the next read misses may have been in force meanwhile.
func (m Memory) AfterPlanting(result Result) Memory {
	for f, fr := range result {
		for t, tr := range fr.Tables {
			if tr.Unproved {
				tr.last = canary.Finding{}
			}
			m = m.With(f.Table(t), tr.last)
		}
	}
	return m
}

// Finding returns the finding of the last read of a table; the zero Finding if there was none.
func (m Memory) Finding(id rules.TableID) canary.Finding { return m.found[id] }

// Restored reports whether a read showed saved rules in any table. Then the daemon probes for
// the flush that may follow, even without a sign of a commit.
func (m Memory) Restored() bool {
	for _, finding := range m.found {
		if finding.Restored != "" {
			return true
		}
	}
	return false
}

// withFamily returns m with another memory's findings of one family. settle collects the
// findings of all families with it.
func (m Memory) withFamily(f rules.Family, of Memory) Memory {
	for id, finding := range of.found {
		if id.Family == f {
			m = m.With(id, finding)
		}
	}
	return m
}
