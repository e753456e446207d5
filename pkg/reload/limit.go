package reload

import (
	"time"

	"golang.org/x/time/rate"
)

// What replays may cost, in milliseconds of CPU time of canaryd and the
// programs that it executes.
const (
	// fillPerSecond is 15 % of a core: with the burst, a minute of flushes without
	// end costs less than 20 %.
	fillPerSecond = 150
	// leastCost is what a replay counts at least: against somebody who never
	// stops there is one replay in leastCost/fillPerSecond = 1.5 s, so that the
	// rules are back within 2 s once he does.
	leastCost = 225
	// bucketSize lets eleven cheap replays pass in a row, and three of those that
	// cost a second each: flushers come in several commands, and whoever
	// flushes now and then must wait for nothing.
	bucketSize = 2400
	// mostDebt bounds the wait, however dear a replay was, to 10 s.
	mostDebt = 10 * fillPerSecond
)

// A Limiter says when the next replay may begin: a token bucket, so that
// somebody who undoes each replay costs the node less than a fifth of a core.
// It is for one goroutine. Times are the caller's.
type Limiter struct{ bucket *rate.Limiter }

// NewLimiter returns a Limiter whose bucket is full.
func NewLimiter() *Limiter {
	return &Limiter{rate.NewLimiter(fillPerSecond, bucketSize)}
}

// Wait returns how long a replay has to wait at the given time; 0 if it may
// begin.
func (l *Limiter) Wait(now time.Time) time.Duration {
	missing := -l.bucket.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	return time.Duration(missing/fillPerSecond*float64(time.Second)).Round(time.Millisecond) + time.Millisecond
}

// Spend notes a replay that ended at the given time and cost that much CPU time.
// It may overdraw the bucket; the next replay waits for that.
func (l *Limiter) Spend(now time.Time, cost time.Duration) {
	most := int64(l.bucket.TokensAt(now)) + mostDebt
	l.bucket.ReserveN(now, int(min(max(cost.Milliseconds(), leastCost), most, bucketSize)))
}
