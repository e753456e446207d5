// Package pace decides how often canaryd tries, looks and logs.
//
// A [Retry] is the time of the next try after a failure. A [Trouble] logs a lasting problem once,
// and its end. A [Making] combines both for a table of canaryd's own that the kernel may refuse. A
// [Budget] bounds the processor time of looks, and [Memory] plans when free memory returns to the
// kernel.
//
// The package starts no timer. Callers pass the present time, and sleep until the earliest time
// ([Earliest]). No function fails. The values are for one goroutine, except [Shared], which any
// may use.
package pace

import (
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// A failed action is tried again as long as its reason lasts, first after 100 ms and finally
// every 30 s. For the lock it is always 100 ms, because the lock may become free at any moment.
// A rule that the kernel refuses stays refused.
const (
	FirstTry = 100 * time.Millisecond
	LastTry  = 30 * time.Second
)

// A Retry is the time of an action, for the first time or again.
type Retry struct {
	At   time.Time // zero: there is nothing to try
	Wait time.Duration
}

// Failed plans the next try after a failed one: the wait doubles from FirstTry to LastTry. If
// another process held the lock, it stays at FirstTry.
func (r *Retry) Failed(err error, now time.Time) {
	wait := min(max(2*r.Wait, FirstTry), LastTry)
	if LockReason(err) {
		wait = FirstTry
	}
	r.In(wait, now)
}

// In plans the next try.
func (r *Retry) In(wait time.Duration, now time.Time) { r.Wait, r.At = wait, now.Add(wait) }

// LockReason reports whether another process held the lock, so that the write did not happen.
func LockReason(err error) bool { return errors.Is(err, iptables.ErrLocked) }

// Earliest returns the earliest of the times that are not zero.
func Earliest(times ...time.Time) time.Time {
	var first time.Time
	for _, t := range times {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// Latest returns the later of two times.
func Latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Due reports whether a time is past; the zero time means never.
func Due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }
