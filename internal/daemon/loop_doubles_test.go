package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestJumpThatItsOwnerPutBackInTheSameMoment: an owner looks for its jump before a replay, and
// inserts it afterwards. Once the owner is quiet only the upper copy is left, and after the
// next flush canaryd restores one. Copies that were known before, or that another process makes
// later, stay.
func TestJumpThatItsOwnerPutBackInTheSameMoment(t *testing.T) {
	insert, remove := "-I OUTPUT "+hostport, "-D OUTPUT "+hostport
	late := 16 * time.Second
	for _, test := range []struct {
		name   string
		before []string // the owner's lines before the flush
		wait   time.Duration
		after  []string // its lines after the replay and that wait
		want   int
		slips  bool // the owner also inserts it between a replay's read and its write
	}{
		{"inserted at once", nil, 30 * time.Millisecond, []string{insert}, 1, false},
		{"inserted a while later", nil, 5 * time.Second, []string{insert}, 1, false},
		{"inserted twice", nil, time.Second, []string{insert, insert}, 1, false},
		{"inserted in the middle of the replay", nil, time.Second, nil, 1, true},
		{"deleted again by its owner", nil, time.Second, []string{insert, remove}, 1, false},
		{"inserted long after", nil, late, []string{insert}, 2, false},
		{"doubled before", []string{insert}, time.Second, nil, 2, false},
		{"doubled before, and at once", []string{insert}, 30 * time.Millisecond, []string{insert}, 2, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				if test.slips && backend == iptables.Legacy {
					return // the lock keeps other processes out from the read to the proof
				}
				r := start(t, backend, setup{})
				for _, line := range test.before {
					r.write(rules.Nat, line)
				}
				r.after(20 * time.Second)
				slip := test.slips
				r.fake.BeforeRestore(func() {
					if slip {
						slip = false
						must(t, r.fake.As(77, "owner").RestoreNoflush(rules.IPv4, section(rules.Nat, insert)))
					}
				})
				r.flushNat()
				r.after(100*time.Millisecond + test.wait)
				// The position of this rule shows which copy is whose.
				r.write(rules.Nat, "-I OUTPUT -j ACCEPT")
				for _, line := range test.after {
					r.write(rules.Nat, line)
				}
				removals := r.fake.Restores()
				r.after(5 * time.Second)
				r.wantReady()
				if n := r.jumps(); n < test.want {
					t.Fatalf("the jump stands %d times before the owner is quiet", n)
				}
				r.after(40 * time.Second)
				if n := r.jumps(); n != test.want {
					t.Errorf("the jump stands %d times, want %d", n, test.want)
				}
				if test.wait < late && slices.Equal(test.after, []string{insert}) {
					if got := texts(r.tables()[rules.IPv4][rules.Nat].Chain("OUTPUT")); got[0] != hostport {
						t.Errorf("the owner's copy is gone: %q", got)
					}
					if r.fake.Restores() == removals {
						t.Error("nothing was removed")
					}
					r.wantLog(`"Extra copies of jumps were removed, and the jumps stay: their owner had written the copies during a replay" family="ipv4" jumps=["nat OUTPUT ` + hostport)
				}
				r.flushNat()
				r.after(30 * time.Second)
				r.wantReady()
				if n := r.jumps(); n != test.want {
					t.Errorf("after the next flush the jump stands %d times, want %d", n, test.want)
				}
				if n := len(r.records(0)); n != 2 {
					t.Errorf("%d flush records, want 2", n)
				}
			})
		})
	}
}

// jumps counts the jumps to host ports in OUTPUT of IPv4.
func (r *rig) jumps() int {
	n := 0
	for _, rule := range r.tables()[rules.IPv4][rules.Nat].Chain("OUTPUT").Rules {
		if !canary.IsMark(rule) && rule.Spec == hostport {
			n++
		}
	}
	return n
}
