package reload

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestLimiter: a caller replays whenever it may, and waits as long as expected.
func TestLimiter(t *testing.T) {
	second := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	for _, test := range []struct {
		name    string
		cost    time.Duration
		every   time.Duration // how often another process flushes
		replays int
		want    []time.Duration // how long each replay has to wait
	}{
		{"one after the other, cheap ones", second(.05), 0, 13,
			[]time.Duration{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, second(.5), second(1.5)}},
		{"one after the other, at 2,000 services", second(.45), 0, 9,
			[]time.Duration{0, 0, 0, 0, 0, 0, second(2), second(3), second(3)}},
		{"three dear ones at once", second(1), 0, 5,
			[]time.Duration{0, 0, 0, second(4), second(6.67)}},
		{"very dear ones", second(20), 0, 3, []time.Duration{0, 0, second(10)}},
		{"a dear one in ten seconds", second(1), second(10), 4, make([]time.Duration, 4)},
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

// TestLimiterRecovers: after a long war the debt is bounded, and soon paid.
func TestLimiterRecovers(t *testing.T) {
	l, now := NewLimiter(), time.Now()
	for range 1000 {
		now = now.Add(l.Wait(now))
		l.Spend(now, time.Minute)
	}
	if wait := l.Wait(now); wait > 10*time.Second+10*time.Millisecond {
		t.Errorf("the next replay has to wait %s, want at most 10 s", wait)
	}
	now = now.Add(time.Minute)
	for i := range 3 {
		if wait := l.Wait(now); wait != 0 {
			t.Errorf("after a minute of peace replay %d has to wait %s", i, wait)
		}
		l.Spend(now, time.Second)
	}
}
