package reload

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestLimiter: who replays whenever it is allowed, and when that is.
func TestLimiter(t *testing.T) {
	second := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	for _, test := range []struct {
		name    string
		cost    time.Duration
		every   time.Duration // how often somebody flushes
		replays int
		want    []time.Duration // how long each replay has to wait
	}{
		{"one after the other, cheap ones", second(.05), 0, 12,
			[]time.Duration{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, second(1.5), second(1.5)}},
		{"three dear ones at once", second(3), 0, 5,
			[]time.Duration{0, 0, 0, second(4.5), second(6)}},
		{"never beyond a fifth of a core", second(.6), second(3), 20, make([]time.Duration, 20)},
		{"now and then", second(.1), second(1.5), 100, make([]time.Duration, 100)},
	} {
		t.Run(test.name, func(t *testing.T) {
			now := time.Now()
			l := NewLimiter()
			var got []time.Duration
			for range test.replays {
				wait := l.Wait(now)
				got = append(got, wait.Round(10*time.Millisecond))
				now = now.Add(wait)
				if again := l.Wait(now); again != 0 {
					t.Fatalf("after a wait of %s there is another one of %s", wait, again)
				}
				l.Spend(now, test.cost)
				now = now.Add(test.every)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("waits (-want +got):\n%s", diff)
			}
		})
	}
}

// TestLimiterRecovers: after a long war the debt is that of one replay.
func TestLimiterRecovers(t *testing.T) {
	l, now := NewLimiter(), time.Now()
	for range 1000 {
		now = now.Add(l.Wait(now))
		l.Spend(now, time.Minute)
	}
	if wait := l.Wait(now); wait > 6100*time.Millisecond {
		t.Errorf("the next replay has to wait %s, want at most 6 s", wait)
	}
	now = now.Add(time.Minute)
	for i := range 3 {
		if wait := l.Wait(now); wait != 0 {
			t.Errorf("after a minute of peace replay %d has to wait %s", i, wait)
		}
		l.Spend(now, time.Minute)
	}
}
