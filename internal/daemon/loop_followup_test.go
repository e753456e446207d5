package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLateWriterOfOneReload: a reload flushes again 300 ms after the replay, without a hint; on
// legacy it bypasses the lock. The looks after a replay begin 50 ms later, at doubling
// distances, and notice it before the next poll.
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
		// The looks follow 50, 150 and 350 ms after the replay. The next poll is more than 600
		// ms away.
		if took := time.Since(late); took > 100*time.Millisecond {
			t.Errorf("the second flush was noticed after %s", took)
		}
		r.settled()
		r.wantReady()
	})
}
