package testkit

import (
	"iter"
	"testing"
	"time"
)

const (
	// pollEvery is the first pause between two looks of Until, and each pause of Stays. A long
	// look is followed by a pause as long, up to pollSlowly, because it takes a processor from
	// canaryd.
	pollEvery  = 20 * time.Millisecond
	pollSlowly = time.Second
	// pollLater bounds the pauses of Until, which grow to a tenth of the time that it has
	// waited. Most looks execute a program, or make canaryd read all tables.
	pollLater = 200 * time.Millisecond
)

// look calls a function, and also returns the pause before the next call.
func look(at func() error, least time.Duration) (pause time.Duration, err error) {
	start := time.Now()
	err = at()
	return min(max(least, time.Since(start)), pollSlowly), err
}

// Until waits until done returns nil, and returns how long that took. It has no limit of its
// own, because a busy machine would exceed each. Shortly before the test's time is over, it
// fails the test with what and with the last error of done.
func Until(t testing.TB, what string, done func() error) time.Duration {
	t.Helper()
	return until(t, what, pollLater, done)
}

// Steadily is Until for looks that also show that something does not happen meanwhile. Their
// pauses do not grow.
func Steadily(t testing.TB, what string, done func() error) time.Duration {
	t.Helper()
	return until(t, what, pollEvery, done)
}

func until(t testing.TB, what string, later time.Duration, done func() error) time.Duration {
	t.Helper()
	limit := Left(t)
	for start := time.Now(); ; {
		pause, err := look(done, max(pollEvery, min(time.Since(start)/10, later)))
		waited := time.Since(start)
		if err == nil {
			return waited
		}
		if waited > limit {
			t.Fatalf("waited %s for %s, until the test's time was nearly over: %v", waited.Round(time.Second), what, err)
		}
		time.Sleep(pause)
	}
}

// Left returns how long a test may wait: the time until its deadline, less some time to report
// its failure.
func Left(t testing.TB) time.Duration {
	const forEver = 24 * time.Hour
	d, has := t.(interface{ Deadline() (time.Time, bool) })
	if !has {
		return forEver
	}
	deadline, has := d.Deadline()
	if !has {
		return forEver
	}
	left := time.Until(deadline)
	return left - min(10*time.Second, left/10)
}

// Pass lets time pass if no state shows that something does not happen, or if the test fixes
// how long something lasts. The reason says which. On a busy machine such a test sees less, but
// never fails.
func Pass(t testing.TB, long time.Duration, reason string) {
	t.Helper()
	timer := time.NewTimer(long)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
		t.Fatalf("the test ended while %s passed, so that it can be seen %s", long, reason)
	}
}

// Stays is Pass with looks in between, the last one when the time is over. The test fails with
// the error of a look.
func Stays(t testing.TB, long time.Duration, reason string, still func() error) {
	t.Helper()
	for start, over := time.Now(), false; ; {
		over = time.Since(start) >= long
		pause, err := look(still, pollEvery)
		if err != nil {
			t.Fatalf("after %s of %s, in which is to be seen %s: %v", time.Since(start).Round(time.Millisecond), long, reason, err)
		}
		if over {
			return
		}
		Pass(t, min(pause, long), reason)
	}
}

// During yields the elapsed time repeatedly, until it reaches long or the test ends. The
// reason, for the reader, names the event that lasts as long.
func During(t testing.TB, long time.Duration, _ string) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		start, ctx := time.Now(), t.Context()
		for passed := time.Duration(0); passed < long && ctx.Err() == nil && yield(passed); {
			passed = time.Since(start)
		}
	}
}

// Receive returns the next value of a channel. Like Until, it has no limit of its own.
func Receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	timer := time.NewTimer(Left(t))
	defer timer.Stop()
	select {
	case value := <-from:
		return value
	case <-timer.C:
		t.Fatalf("waited for %s, until the test's time was nearly over", what)
		panic("unreachable")
	}
}
