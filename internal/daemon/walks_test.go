package daemon

import (
	"testing"
	"time"
)

// TestWalks: how many walks of a given cost a writer that never rests gets.
func TestWalks(t *testing.T) {
	for _, test := range []struct {
		name     string
		cost     time.Duration
		families int
		want     int // in the first minute
	}{
		{"20,000 rules of two families", 13 * time.Millisecond, 2, 54}, // (100 ms + 600 ms) / 13 ms
		{"20,000 rules of one family", 13 * time.Millisecond, 1, 100},  // (100 ms + 1200 ms) / 13 ms
		{"as long as the burst", walkBurst, 2, 7},
		{"suspended for a minute", time.Minute, 2, 1},
	} {
		var w walks
		start := time.Unix(1e9, 0)
		now, n := start, 0
		for now.Before(start.Add(time.Minute)) {
			if ready := w.readyAt(test.families); now.Before(ready) {
				now = ready
				continue
			}
			now = now.Add(test.cost)
			w.spend(now, test.cost, test.families)
			n++
		}
		if n < test.want || n > test.want+1 {
			t.Errorf("%s: %d walks, want %d", test.name, n, test.want)
		}
	}
}

// TestWalksAfterQuiet: however much was spent, a quiet time pays for it, and no
// quiet time saves up for more than the burst.
func TestWalksAfterQuiet(t *testing.T) {
	const families = 2
	var w walks
	now := time.Unix(1e9, 0)
	if w.readyAt(families).After(now) {
		t.Error("the first walk has to wait")
	}
	for round := range 3 {
		n := 0
		for !w.readyAt(families).After(now) {
			w.spend(now, walkBurst/10, families)
			n++
		}
		if n != 11 { // the eleventh overdraws by nothing yet
			t.Errorf("round %d: %d walks at once, want 11", round, n)
		}
		now = now.Add(time.Hour)
	}
	w.spend(now, time.Minute, families)
	if wait := w.readyAt(families).Sub(now); wait > 0 {
		t.Errorf("after one walk that was suspended for a minute the next one waits %s", wait)
	}
	w.spend(now, time.Minute, families)
	if wait := w.readyAt(families).Sub(now); wait != walkBurst*walkShare*families {
		t.Errorf("after a second one it waits %s", wait)
	}
	if w.spend(now.Add(-time.Hour), 0, families); w.owed != 2*walkBurst {
		t.Errorf("a clock that goes back leaves %s owed", w.owed)
	}
}
