package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
)

// TestLooksInAStorm: the loop answers 200 hints at once, and in a storm one each 5 ms. After a
// quiet second it answers at once again.
func TestLooksInAStorm(t *testing.T) {
	l := looking{storm: pace.Bucket{Share: pace.StormShare}}
	now := time.Unix(1e9, 0)
	storm := func() (looks, atOnce int, longest time.Duration) {
		var hinted time.Time
		for end := now.Add(10 * time.Second); now.Before(end); now = now.Add(time.Millisecond) {
			if now.UnixMilli()%2 == 0 {
				l.hint(now)
				hinted = pace.Earliest(hinted, now)
			}
			if !pace.Due(l.at, now) {
				continue
			}
			waited := now.Sub(hinted)
			longest = max(longest, waited)
			l.storm.Spend(now, pace.StormCharge)
			if !l.begin(now) || l.evidence != hinted {
				t.Fatalf("a look for a hint of %v has evidence since %v", hinted, l.evidence)
			}
			if looks++; waited == 0 && looks == atOnce+1 {
				atOnce = looks
			}
			hinted = time.Time{}
		}
		return looks, atOnce, longest
	}
	for _, round := range []string{"at first", "after a quiet second"} {
		looks, atOnce, longest := storm()
		// 200 looks of the burst, and one each 5 ms. Meanwhile the bucket refills a little.
		if looks < 2150 || looks > 2250 || atOnce < 200 || longest > 5*time.Millisecond {
			t.Errorf("%s: %d looks, the first %d at once, and the longest wait was %s", round, looks, atOnce, longest)
		}
		now = now.Add(time.Second)
		// A hint does not wait for the first look after a replay.
		l.hint(now)
		if l.afterReplay(now); l.at.Sub(now) > 5*time.Millisecond {
			t.Errorf("%s: a hint before a replay is answered %s after it", round, l.at.Sub(now))
		}
		l.begin(now)
	}
}
