package reload

import (
	"time"

	"golang.org/x/time/rate"
)

// The limits on the cost of replays, in milliseconds of processor time of canaryd and its children.
const (
	// fillPerSecond is 15 % of a core. Together with the burst, a minute of constant flushes costs
	// less than 20 %.
	fillPerSecond = 150
	// leastCost is the least cost that counts for a replay. Against a flusher that never stops,
	// canaryd replays once in leastCost/fillPerSecond = 1.5 s. So the rules are back within 2 s
	// after it stops.
	leastCost = 225
	// bucketSize allows eleven cheap replays in a row, or three with a cost of a second each. A
	// flusher runs several commands, and an occasional flush must not wait.
	bucketSize = 2400
	// mostDebt bounds the wait to 10 s, however expensive a replay was.
	mostDebt = 10 * fillPerSecond
)

// A Limiter says when the next replay may begin. It is a token bucket: a flusher that undoes every
// replay costs the node less than a fifth of a core. One goroutine may use it; times are the
// caller's.
type Limiter struct{ bucket *rate.Limiter }

// NewLimiter returns a Limiter whose bucket is full.
func NewLimiter() *Limiter {
	return &Limiter{rate.NewLimiter(fillPerSecond, bucketSize)}
}

// Wait returns how long a replay has to wait at this time; 0 if it may begin. The daemon
// postpones the replay until then.
func (l *Limiter) Wait(now time.Time) time.Duration {
	missing := -l.bucket.TokensAt(now)
	if missing <= 0 {
		return 0
	}
	return time.Duration(missing/fillPerSecond*float64(time.Second)).Round(time.Millisecond) + time.Millisecond
}

// Spend counts a replay that ended at this time and cost so much processor time. It may overdraw
// the bucket; the next replay waits for that.
func (l *Limiter) Spend(now time.Time, cost time.Duration) {
	most := int64(l.bucket.TokensAt(now)) + mostDebt
	l.bucket.ReserveN(now, int(min(max(cost.Milliseconds(), leastCost), most, bucketSize)))
}
