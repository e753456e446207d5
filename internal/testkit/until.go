package testkit

import (
	"testing"
	"time"
)

// pollEvery is how long Until waits between two looks.
const pollEvery = 20 * time.Millisecond

// Until waits until done returns nil, and returns how long that took. It has no limit of its own: a
// busy machine would exceed each. Shortly before its time is over, the test fails with what
// it waited for, and with what done returned last.
func Until(t testing.TB, what string, done func() error) time.Duration {
	t.Helper()
	limit := Left(t)
	for start := time.Now(); ; time.Sleep(pollEvery) {
		err := done()
		waited := time.Since(start)
		if err == nil {
			return waited
		}
		if waited > limit {
			t.Fatalf("waited %s for %s, until the test's time was nearly over: %v", waited.Round(time.Second), what, err)
		}
	}
}

// Left returns how long a test may wait: the time until its deadline, less a bit in which it can
// say why it fails.
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

// Pass lets time pass where no state shows that something does not happen. The reason says what
// that is. A busy machine makes such a test see less, and never fail.
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

// Receive returns the next value of a channel. As Until, it has no limit of its own.
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
