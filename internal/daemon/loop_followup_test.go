package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLateWriterOfOneReload: a reload flushes once more 300 ms after the replay, and nothing hints
// at it: on legacy it bypasses the lock. The looks that follow a replay, 50 ms after it and then
// at doubling distances, notice it before the next poll.
func TestLateWriterOfOneReload(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{deaf: true})
		flush := func() { must(t, r.fake.Bypassing().Flush(rules.IPv4, rules.Nat, "")) }
		flush()
		for len(r.d.Status().Flushes) == 0 || r.d.Status().Flushes[0].AbsentSeconds == 0 {
			r.after(time.Millisecond)
		}
		r.after(300 * time.Millisecond)
		flush()
		late := time.Now()
		for len(r.d.Status().Flushes) < 2 && time.Since(late) < time.Minute {
			r.after(time.Millisecond)
		}
		// The looks come 50, 150 and 350 ms after the replay; the next poll is more than 600 ms
		// away.
		if took := time.Since(late); took > 100*time.Millisecond {
			t.Errorf("the second flush was noticed after %s", took)
		}
		r.settled()
		r.wantReady()
	})
}
