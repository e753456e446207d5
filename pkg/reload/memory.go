package reload

import (
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Memory is what the reads and tries so far have shown of one loss. The caller keeps it while the
// loss lasts, and passes it with each Job. It is a value; the zero Memory is of a new loss.
type Memory struct {
	// found is what the last read of each table found. Later reads cannot show all of it: see
	// canary.Seen.
	found map[rules.TableID]canary.Finding
	// unproved is what earlier tries wrote and could not read back. The next try that can read the
	// table decides: what is in force then is proved, and counts as this replay's work.
	unproved map[rules.TableID]TableResult
	// misread is what earlier tries wrote otherwise than planned.
	misread map[rules.TableID]misread
}

// With returns the memory after another read of a table. A failed read adds nothing.
func (m Memory) With(id rules.TableID, finding canary.Finding) Memory {
	if finding.Verdict != canary.Unknown {
		m.found = tableid.With(m.found, id, finding)
	}
	return m
}

// After returns the memory after a replay.
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

// AfterPlanting returns the memory after a write of marks alone. A table that was written and could
// not be read since has no finding: what the next read misses may have stood in the meantime.
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

// Finding returns what the last read of a table found; the zero Finding if there was none.
func (m Memory) Finding(id rules.TableID) canary.Finding { return m.found[id] }

// Restored reports whether a read showed saved rules in any table.
func (m Memory) Restored() bool {
	for _, finding := range m.found {
		if finding.Restored != "" {
			return true
		}
	}
	return false
}

// withFamily returns m with what another memory knows of one family's reads.
func (m Memory) withFamily(f rules.Family, of Memory) Memory {
	for id, finding := range of.found {
		if id.Family == f {
			m = m.With(id, finding)
		}
	}
	return m
}
