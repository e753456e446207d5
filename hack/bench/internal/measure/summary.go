package measure

import (
	"fmt"
	"math"
	"slices"
)

// A Summary describes several measurements of the same value.
type Summary struct {
	Median float64 `json:"median"`
	Least  float64 `json:"least"`
	Most   float64 `json:"most"`
	Count  int     `json:"count"`
}

// Summarize returns the summary of values; without any it is zero.
func Summarize(values ...float64) Summary {
	if len(values) == 0 {
		return Summary{}
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := sorted[len(sorted)/2]
	if len(sorted)%2 == 0 {
		middle = (middle + sorted[len(sorted)/2-1]) / 2
	}
	return Summary{Median: middle, Least: sorted[0], Most: sorted[len(sorted)-1], Count: len(sorted)}
}

// Exponent returns k such that the time grows with the k-th power of the size; 1 is linear. It
// is NaN without measurements.
func Exponent(fewer, more Summary, times float64) float64 {
	if fewer.Count == 0 || more.Count == 0 || fewer.Median <= 0 || more.Median <= 0 {
		return math.NaN()
	}
	return math.Log(more.Median/fewer.Median) / math.Log(times)
}

// Duration returns seconds for people, with three digits.
func Duration(seconds float64) string {
	switch {
	case seconds <= 0:
		return "0"
	case seconds < 1e-3:
		return digits(seconds*1e6) + " µs"
	case seconds < 1:
		return digits(seconds*1e3) + " ms"
	default:
		return digits(seconds) + " s"
	}
}

// Spread returns a summary of seconds for people: the median, and for several measurements the
// least and the most.
func (s Summary) Spread() string {
	switch s.Count {
	case 0:
		return "-"
	case 1:
		return Duration(s.Median)
	default:
		return fmt.Sprintf("%s (%s - %s)", Duration(s.Median), Duration(s.Least), Duration(s.Most))
	}
}

func digits(value float64) string {
	switch {
	case value < 10:
		return fmt.Sprintf("%.2f", value)
	case value < 100:
		return fmt.Sprintf("%.1f", value)
	default:
		return fmt.Sprintf("%.0f", value)
	}
}
