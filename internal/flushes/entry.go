package flushes

import (
	"encoding/json"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
)

// A FlushDetail is what the journal keeps of a flush in addition to its record.
type FlushDetail struct {
	Diff []api.TableDiff `json:"diff"`
}

// EntryOf returns what the journal has of a record; without a diff that has no detail.
func EntryOf(record api.Flush, diff []api.TableDiff) (e journal.Entry, err error) {
	e = journal.Entry{ID: record.ID, About: record.Summary()}
	if e.Record, err = json.Marshal(record); err == nil && len(diff) > 0 {
		e.Detail, err = json.Marshal(FlushDetail{diff})
	}
	return e, err
}

// StoredFlush reads what write wrote.
func StoredFlush(e journal.Entry) (api.Flush, bool) {
	var record api.Flush
	err := json.Unmarshal(e.Record, &record)
	return record, err == nil && record.ID == e.ID && !record.Time.IsZero() && (record.Kind.Loss() || record.Requested())
}

// OfEarlier returns the record as one of an earlier run. If it was not closed it
// never will be.
func OfEarlier(r api.Flush) api.Flush {
	r.Earlier = true
	if r.Unanswered() {
		r.Outcome = api.Interrupted
	}
	return r
}
