package cluster

import (
	"testing"
	"time"
)

// answersIn is the limit for an answer, because a connection's second SYN follows after 1 s.
const answersIn = 500 * time.Millisecond

// A try is one connection of a client.
type try struct {
	at     time.Time
	failed bool
}

// longestGap returns the longest span from a failed connection to the next that succeeds.
func longestGap(all []try) (longest time.Duration) {
	var since time.Time
	for _, one := range all {
		switch {
		case one.failed && since.IsZero():
			since = one.at
		case !one.failed && !since.IsZero():
			longest, since = max(longest, one.at.Sub(since)), time.Time{}
		}
	}
	if !since.IsZero() {
		longest = max(longest, all[len(all)-1].at.Sub(since)+answersIn)
	}
	return longest
}

// TestLongestGap: a gap lasts from the first failed connection to the next that succeeds.
func TestLongestGap(t *testing.T) {
	for _, c := range []struct {
		name  string
		tries string // every 20 ms: . answered, x failed
		want  time.Duration
	}{
		{"none", ".....", 0},
		{"one", "..x..", 20 * time.Millisecond},
		{"the longer of two", ".x..xxx.", 60 * time.Millisecond},
		{"from the beginning", "xx..", 40 * time.Millisecond},
		{"open at the end", "...xx", 20*time.Millisecond + answersIn},
		{"nothing asked", "", 0},
	} {
		var all []try
		for i, r := range c.tries {
			all = append(all, try{time.Unix(0, 0).Add(time.Duration(i) * 20 * time.Millisecond), r == 'x'})
		}
		if got := longestGap(all); got != c.want {
			t.Errorf("%s: the gap of %s is %s, want %s", c.name, c.tries, got, c.want)
		}
	}
}
