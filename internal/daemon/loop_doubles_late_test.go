package daemon

import (
	"errors"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestDoubledJumpThatIsReadLate: an owner inserts its jump at the moment of a replay, and
// canaryd cannot read it before the grace is over. canaryd removes the copy anyway.
func TestDoubledJumpThatIsReadLate(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		r.flushNat()
		r.after(200 * time.Millisecond)
		r.fake.FailReads(errors.New("the tables changed all the time while they were read"))
		r.write(rules.Nat, "-I OUTPUT "+hostport)
		r.after(20 * time.Second)
		r.fake.FailReads(nil)
		r.after(time.Minute)
		r.wantReady()
		if n := r.jumps(); n != 1 {
			t.Errorf("the jump stands %d times, want once", n)
		}
	})
}
