package pace

import "time"

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

// Due reports whether a time that may be zero, for never, has come.
func Due(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }
