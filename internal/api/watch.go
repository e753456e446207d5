package api

import (
	"errors"
	"reflect"
	"time"
)

// MostWatchers is how many clients may follow the status at a time.
const MostWatchers = 8

// ErrTooManyWatchers means that MostWatchers clients follow the status already.
var ErrTooManyWatchers = errors.New("8 clients follow the status already, and canaryd takes no more")

// WatchedFlushes is how many flush records a followed status has.
const WatchedFlushes = 10

// Differs reports whether two statuses differ. It ignores the time of the last read, the delay
// of the learning, and the files on disk, because they change all the time.
func (s Status) Differs(other Status) bool {
	return !reflect.DeepEqual(s.watched(), other.watched())
}

// watched returns the status without the fields that change all the time, so that Differs
// ignores them.
func (s Status) watched() Status {
	s.LastKnown, s.LearningPendingSince, s.Stored = time.Time{}, time.Time{}, nil
	s.Generation.Captured = time.Time{}
	s.NativeStored = nil
	s.Native = changed(s.Native, func(t *NativeTable) { t.Captured, t.Generation = time.Time{}, "" })
	s.Flushes = s.Flushes[:min(len(s.Flushes), WatchedFlushes)]
	if len(s.Flushes) == 0 {
		s.Flushes = nil
	}
	return s
}

// ForWatch returns the status with its newest flush records only.
func (s Status) ForWatch() Status {
	s.Flushes = s.Flushes[:min(len(s.Flushes), WatchedFlushes)]
	return s
}
