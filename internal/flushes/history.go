// Package flushes describes one flush in numbers, names and words, and keeps the records of the
// last flushes.
//
// [HitOf] counts the losses of one table, and [AddLoss] adds them to a record. [Accuse],
// [AddCulprit] and [SettleCulprit] name the processes. [EndAbsence] ends the record, and [LogBack]
// logs it. A [History] holds the last records, and [EntryOf] and [StoredFlush] convert a record for
// the journal. [NewDiffWriter] and [NewNativeDiffWriter] write the lost rules as a diff of bounded
// size.
//
// Records are values without locks: the loop's goroutine changes them, and readers get copies.
package flushes

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
)

// History holds the flush records in memory, the newest first.
type History []api.Flush

// Remember puts a record before all others. Records beyond Kept are dropped, and those beyond
// recordsListed lose their long lists.
func (h *History) Remember(record api.Flush) {
	list := slices.Insert(*h, 0, record)
	if len(list) > Kept {
		list = list[:Kept]
	}
	if len(list) > recordsListed {
		dropLists(&list[recordsListed])
	}
	*h = list
}

// Rewrite replaces the record with the same ID, or puts the record before all others. The loop
// calls it as the record changes.
func (h *History) Rewrite(record api.Flush) {
	if i := h.Index(record.ID); i >= 0 {
		record.Earlier = (*h)[i].Earlier
		(*h)[i] = record
		return
	}
	h.Remember(record)
}

// flushIDLength is the least length of an ID. An ID is the number of microseconds since 1970 as
// a hexadecimal number, and has this length since 1978.
const flushIDLength = 13

// Find returns the index of the flush of that number (1 is the newest) or ID, or -1. A request
// names a flush so.
func (h History) Find(name string) int {
	if n, err := strconv.Atoi(name); err == nil && len(name) < flushIDLength {
		if 1 <= n && n <= len(h) {
			return n - 1
		}
		return -1
	}
	return h.Index(name)
}

// Index returns the index of the flush of that ID, or -1.
func (h History) Index(id string) int {
	return slices.IndexFunc(h, func(f api.Flush) bool { return f.ID == id })
}

// Offer words the numbers of flushes that a request may name, for the error about a wrong one.
func (h History) Offer() string {
	switch len(h) {
	case 0:
		return "none was seen"
	case 1:
		return "there is 1"
	default:
		return fmt.Sprintf("there are 1 to %d, the newest is 1", len(h))
	}
}

// Around returns the ID of the flush that lasted at that time, give or take margin; "" if there
// was none. A policy that became DROP is reported with it.
func (h History) Around(at time.Time, margin time.Duration) string {
	for _, f := range h {
		end := f.Time.Add(api.Seconds(f.AbsentSeconds) + margin)
		if f.Drill == "" && !f.Requested() && !f.Earlier && at.After(f.Time.Add(-margin)) && (at.Before(end) || f.Open()) {
			return f.ID
		}
	}
	return ""
}

// A FlushDetail is the journal's addition to a flush record.
type FlushDetail struct {
	Diff []api.TableDiff `json:"diff"`
}

// EntryOf returns the journal's entry for a record, with its diff as detail; without a diff it
// has none. StoredFlush reads it.
func EntryOf(record api.Flush, diff []api.TableDiff) (e journal.Entry, err error) {
	e = journal.Entry{ID: record.ID, About: record.Summary()}
	if e.Record, err = json.Marshal(record); err == nil && len(diff) > 0 {
		e.Detail, err = json.Marshal(FlushDetail{diff})
	}
	return e, err
}

// StoredFlush decodes an entry that EntryOf made; false for an entry that is no complete
// record.
func StoredFlush(e journal.Entry) (api.Flush, bool) {
	var record api.Flush
	err := json.Unmarshal(e.Record, &record)
	return record, err == nil && record.ID == e.ID && !record.Time.IsZero() && (record.Kind.Loss() || record.Requested())
}

// OfEarlier returns the record as a record of an earlier run. A record that was still open ends
// as interrupted.
func OfEarlier(r api.Flush) api.Flush {
	r.Earlier = true
	if r.Unanswered() {
		r.Outcome = api.Interrupted
	}
	return r
}

// A process that flushes the same tables again and again would push all other flushes out of
// the history. So the first FoldFrom such flushes have records. Later ones are counted in the
// newest of these records, as long as two in a row are at most FoldWithin apart.
const (
	FoldFrom   = 10
	FoldWithin = time.Minute
)

// fewChains is the largest number of chains whose names count in a likeness. A whole table has
// more, and their names change with each service.
const fewChains = 3

// likeness returns the same text for flushes that fold. They hit the same tables in the same
// kinds by the same process, and the same chains if a table lost few. The text has no pids,
// because a process that is executed for each flush has another pid each time.
func likeness(f api.Flush) string {
	var b strings.Builder
	for _, t := range f.TablesHit() {
		fmt.Fprintf(&b, "%s %s %s\n", t.Family, t.Table, t.Kind)
		if len(t.PerChain) <= fewChains {
			var names []string
			for _, c := range t.PerChain {
				names = append(names, c.Chain)
			}
			fmt.Fprintln(&b, slices.Sorted(slices.Values(names)))
		}
	}
	for _, l := range f.Native {
		fmt.Fprintf(&b, "%s %s\n", l.Table, l.Kind)
	}
	fmt.Fprintf(&b, "%q %q %q", f.Culprit.Comm, f.Culprit.Unit, f.Culprit.ContainerID)
	return b.String()
}

// FoldsInto returns the record in which a flush is counted; nil if it gets a record of its own,
// as a long flush always does. Records of an earlier run, of drills and of requests count
// nothing.
func (h History) FoldsInto(f api.Flush) *api.Flush {
	if f.Drill != "" || f.Requested() || len(f.Lost.Tables)+len(f.Native) == 0 || api.Seconds(f.AbsentSeconds) >= api.LastsLong {
		return nil
	}
	like, alike, into := likeness(f), 0, -1
	for i := range h {
		r := &h[i]
		if r.Earlier || r.Drill != "" || f.Time.Sub(r.Latest()) > FoldWithin || likeness(*r) != like {
			continue
		}
		if alike++; into < 0 || r.Repeated != nil {
			into = i
		}
	}
	if into < 0 || alike < FoldFrom && h[into].Repeated == nil {
		return nil
	}
	return &h[into]
}

// Counting returns the index of the record in which the flush of that ID is counted, or -1. The
// log also has IDs of flushes without a record of their own.
func (h History) Counting(id string) int {
	at, err := strconv.ParseInt(id, 16, 64)
	if err != nil || len(id) < flushIDLength {
		return -1
	}
	return slices.IndexFunc(h, func(f api.Flush) bool {
		return f.Repeated != nil && at > f.Time.UnixMicro() && at <= f.Repeated.Last.UnixMicro()
	})
}
