package reload

import (
	"github.com/canaryd/canaryd/pkg/tableid"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Found is what the last reads in the course of one loss found, by family and
// table. Some of it no later read can tell: see canary.Seen. It is a value.
type Found map[rules.TableID]canary.Finding

// With returns what is found after another read of a table. A read that failed
// tells nothing.
func (m Found) With(id rules.TableID, finding canary.Finding) Found {
	if finding.Verdict == canary.Unknown {
		return m
	}
	return tableid.With(m, id, finding)
}

// After returns what is found after a replay was tried. Of a table that was written
// and could not be read since, nothing is: what is missing of it next may have stood
// meanwhile.
func (m Found) After(result Result) Found {
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
