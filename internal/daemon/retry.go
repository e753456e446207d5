package daemon

import (
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
)

// What failed is tried again for as long as its reason lasts, after 100 ms at first and every
// 30 s at last. For the lock it is always 100 ms: the lock comes free at any moment, while a
// rule that the kernel refuses stays refused.
const (
	firstTry = 100 * time.Millisecond
	lastTry  = 30 * time.Second
)

// A retry is when something is tried, for the first time or again.
type retry struct {
	at   time.Time // zero: there is nothing to try
	wait time.Duration
}

// failed plans the next try after one that failed.
func (r *retry) failed(err error, now time.Time) {
	wait := min(max(2*r.wait, firstTry), lastTry)
	if lockReason(err) {
		wait = firstTry
	}
	r.in(wait, now)
}

// in plans the next try.
func (r *retry) in(wait time.Duration, now time.Time) { r.wait, r.at = wait, now.Add(wait) }

// lockReason reports whether another process held the lock, so that nothing was written.
func lockReason(err error) bool { return errors.Is(err, iptables.ErrLocked) }
