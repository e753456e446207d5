package daemon

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSecondFlusher: the first flush is replayed and proved, and a second one by another
// process follows as soon as one likes. Each has its own record and time.
func TestSecondFlusher(t *testing.T) {
	// A nanosecond passes when every goroutine waits: after the proof. Without it the second
	// flush may precede the proof, and then belongs to the same record.
	for _, after := range []time.Duration{time.Nanosecond, 10 * time.Microsecond, time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				var once sync.Once
				var second atomic.Pointer[time.Time]
				flush := func() {
					now := time.Now()
					second.Store(&now)
					must(t, r.fake.As(22, "nft").FlushRuleset())
				}
				r.fake.OnCommit(func(c nft.Commit) {
					if c.Own { // the replay, whose proof follows at once
						once.Do(func() { time.AfterFunc(after, flush) })
					}
				})
				must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, ""))
				r.settled()
				records := r.records(0)
				if len(records) != 2 {
					t.Fatalf("%d records, want one for each flusher: %+v", len(records), records)
				}
				for i, pid := range []uint32{11, 22} {
					if record := records[i]; record.Culprit.PID != pid || !slices.Equal(pidsOf(record.Culprits), []uint32{pid}) {
						t.Errorf("record %d blames %+v, want pid %d", i+1, record.Culprits, pid)
					}
				}
				if late := records[1].Time.Sub(*second.Load()); late < 0 || late > 5*time.Millisecond {
					t.Errorf("the second record begins %s after its flush", late)
				}
			})
		})
	}
}

// TestSecondFlusherUnheard: the notifications of commits after the proof are lost. canaryd
// names the process that certainly took something, and says that there may be others.
func TestSecondFlusherUnheard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, ""))
		r.fake.ForgetTakings()
		must(t, r.fake.As(22, "nft").FlushRuleset())
		r.settled()
		record := r.oneRecord()
		if got := record.ByText(); got != "nft (pid 22), unknown" || !record.CulpritsMissed {
			t.Errorf("the list says by %q of %+v", got, record.Culprits)
		}
		r.wantLog(fmt.Sprintf("by=%q", "pid 22 (nft -F), unknown"))
	})
}
