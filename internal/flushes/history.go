// Package flushes says what one flush took, in numbers, names and words, and keeps the records of
// the last ones.
package flushes

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// History is the flush records that are kept in memory, the newest first.
type History []api.Flush

// Remember puts a record before the others.
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

// Rewrite puts a record in the place of the one with its ID, or before all others.
func (h *History) Rewrite(record api.Flush) {
	if i := h.Index(record.ID); i >= 0 {
		record.Earlier = (*h)[i].Earlier
		(*h)[i] = record
		return
	}
	h.Remember(record)
}

// flushIDLength is that of an ID, at least: the microseconds since 1970 as a
// hexadecimal number, since 1978.
const flushIDLength = 13

// Find returns the index of the flush of that number or ID, or -1.
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

// Offer says what may be asked for.
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

// Around returns the ID of the flush that was under way less than margin before or after that time;
// "" if there was none.
func (h History) Around(at time.Time, margin time.Duration) string {
	for _, f := range h {
		end := f.Time.Add(api.Seconds(f.AbsentSeconds) + margin)
		if f.Drill == "" && !f.Requested() && !f.Earlier && at.After(f.Time.Add(-margin)) && (at.Before(end) || f.Open()) {
			return f.ID
		}
	}
	return ""
}
