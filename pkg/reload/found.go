package reload

import (
	"github.com/canaryd/canaryd/pkg/tableid"
	"maps"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Found is what the last reads in the course of one loss found, by family and
// table. Some of it no later read can tell: see canary.Seen. It is a value.
type Found map[rules.TableID]canary.Finding

// With returns what is found after another read of a table. A read that failed
// tells nothing.
func (m Found) With(f rules.Family, t rules.TableName, finding canary.Finding) Found {
	if finding.Verdict == canary.Unknown {
		return m
	}
	next := make(Found, len(m)+1)
	maps.Copy(next, m)
	if next[f] = maps.Clone(tableid.Of(m, f)); tableid.Of(next, f) == nil {
		next[f] = map[rules.TableName]canary.Finding{}
	}
	next[f.Table(t)] = finding
	return next
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
