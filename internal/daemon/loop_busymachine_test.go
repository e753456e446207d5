package daemon

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestWalksOnABusyMachine: a walk that mostly waits for a processor costs only its processor
// time. So canaryd notices a flush as on an idle machine, though another process never stops
// writing.
func TestWalksOnABusyMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &dearKernel{Fake: loadedFake(t, iptables.Legacy), cost: 50 * time.Millisecond}
		lines := []string{":KUBE-SERVICES - [0:0]", ":KUBE-SVC-LARGELARGELARGEL - [0:0]", "-A KUBE-SERVICES -j KUBE-SVC-LARGELARGELARGEL"}
		for n := range 2000 {
			lines = append(lines, fmt.Sprintf("-A KUBE-SVC-LARGELARGELARGEL -d 10.1.%d.%d/32 -j RETURN", n/250, n%250))
		}
		must(t, k.RestoreNoflush(rules.IPv4, section(rules.Nat, lines...)))
		r := run(t, k.Fake, setup{kernel: k, cpu: func() time.Duration { return time.Duration(k.spent.Load()) / 50 }})
		r.after(time.Minute) // until the budget is full
		r.wantReady()
		busy := func(long time.Duration) {
			for n, begin := 0, time.Now(); time.Since(begin) < long; n++ {
				r.endpoint(n, false)
				r.after(10 * time.Millisecond)
			}
		}
		busy(20 * time.Second)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, "PREROUTING")) // the table stays large
		busy(10 * time.Second)
		if got := r.oneRecord(); got.NoticedSeconds > 1 {
			t.Errorf("the flush was noticed after %.2f s", got.NoticedSeconds)
		}
	})
}
