package pace

import (
	"testing"
	"time"
)

// TestBudget counts the walks of a given cost while a writer never rests.
func TestBudget(t *testing.T) {
	for _, test := range []struct {
		name     string
		cost     time.Duration
		families int
		want     int // in the first minute
	}{
		{"20,000 rules of two families", 13 * time.Millisecond, 2, 47}, // (100 ms + 500 ms) / 13 ms
		{"20,000 rules of one family", 13 * time.Millisecond, 1, 85},   // (100 ms + 1000 ms) / 13 ms
		{"as long as the burst", WalkBurst, 2, 6},
		{"suspended for a minute", time.Minute, 2, 1},
	} {
		w := Bucket{Share: WalkShare * test.families}
		start := time.Unix(1e9, 0)
		now, n := start, 0
		for now.Before(start.Add(time.Minute)) {
			if ready := w.ReadyAt(); now.Before(ready) {
				now = ready
				continue
			}
			now = now.Add(test.cost)
			w.Spend(now, test.cost)
			n++
		}
		if n < test.want || n > test.want+1 {
			t.Errorf("%s: %d walks, want %d", test.name, n, test.want)
		}
	}
}

// TestBudgetAfterQuiet: a quiet time pays for all earlier walks, but saves up at most the
// burst.
func TestBudgetAfterQuiet(t *testing.T) {
	const share = 2 * WalkShare
	w := Bucket{Share: share}
	now := time.Unix(1e9, 0)
	if w.ReadyAt().After(now) {
		t.Error("the first walk has to wait")
	}
	for round := range 3 {
		n := 0
		for !w.ReadyAt().After(now) {
			w.Spend(now, WalkBurst/10)
			n++
		}
		if n != 11 { // the eleventh does not overdraw yet
			t.Errorf("round %d: %d walks at once, want 11", round, n)
		}
		now = now.Add(time.Hour)
	}
	w.Spend(now, time.Minute)
	if wait := w.ReadyAt().Sub(now); wait > 0 {
		t.Errorf("after one walk that was suspended for a minute the next one waits %s", wait)
	}
	w.Spend(now, time.Minute)
	if wait := w.ReadyAt().Sub(now); wait != WalkBurst*share {
		t.Errorf("after a second one it waits %s", wait)
	}
	if w.Spend(now.Add(-time.Hour), 0); w.owed != 2*WalkBurst {
		t.Errorf("a clock that goes back leaves %s owed", w.owed)
	}
}
