package daemon

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSavedRulesBesideABusyOwner: an owner adds and removes rules ten times a second, and so
// never leaves the quiet in which marks are renewed. A file from before a new service still
// counts as old, and canaryd restores the service.
func TestSavedRulesBesideABusyOwner(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(5 * time.Second)
		turn := 0
		busy := func(length time.Duration) {
			for end := time.Now().Add(length); time.Now().Before(end); turn++ {
				r.write(rules.Nat, ":"+endpoint(turn)+" - [0:0]", "-A "+endpoint(turn)+" -j RETURN")
				if turn > 5 {
					r.write(rules.Nat, "-F "+endpoint(turn-5), "-X "+endpoint(turn-5))
				}
				r.after(100 * time.Millisecond)
			}
		}
		busy(time.Second)
		nonce := r.canary(rules.Nat)
		saved := r.fake.SaveTable(rules.IPv4, rules.Nat)
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		busy(12 * time.Second)
		want := r.chain(rules.IPv4, rules.Nat, latecome)
		if now := r.canary(rules.Nat); now == nonce || len(want) == 0 {
			t.Fatalf("the marks are still %s", now)
		}
		renewals := r.fake.Restores()
		busy(30 * time.Second)
		if n := r.fake.Restores() - renewals; n < 2 || n > 4 {
			t.Errorf("the marks were renewed %d times in 30 s, want once in 10 s", n)
		}
		must(t, r.fake.Restore(rules.IPv4, saved))
		r.after(3 * time.Second)
		r.wantReady()
		if got := r.chain(rules.IPv4, rules.Nat, latecome); len(got) != len(want) {
			t.Errorf("the service that came after the file was saved has %v, want %v", got, want)
		}
		if kind := r.oneRecord().Kind; kind != canary.Replaced {
			t.Errorf("the restored file is %s", kind)
		}
	})
}

// TestMarksBesideAnOwnerThatNeverRests: on nft an owner commits within each guarded write. The
// marks are renewed anyway: the first try goes stale, and only the marks guard the next tries. A
// flush within such a try is not hidden.
func TestMarksBesideAnOwnerThatNeverRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		turn, tries, flush := 0, 0, false
		commit := func() {
			turn++
			r.write(rules.Nat, ":"+endpoint(0)+" - [0:0]", fmt.Sprintf("-A %s -p tcp --dport %d -j RETURN", endpoint(0), turn))
		}
		fake := loadedFake(t, iptables.NFT)
		step := func(what string, _ iptables.Session) {
			if what != "restore" || turn == 0 {
				return
			}
			tries++
			if commit(); flush {
				flush = false
				must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			}
		}
		r = startOn(t, fake, setup{kernel: stepping{fake, step}})
		r.after(5 * time.Second)
		busy := func(length time.Duration) (nonces int) {
			last := r.canary(rules.Nat)
			for end := time.Now().Add(length); time.Now().Before(end); {
				commit()
				r.after(10 * time.Millisecond)
				if now := r.canary(rules.Nat); now != last {
					nonces, last = nonces+1, now
				}
			}
			return nonces
		}
		if n := busy(time.Minute); n < 4 || n > 6 || tries != n+1 {
			t.Errorf("%d new marks in a minute, by %d tries; want one each 10 s, and one stale try", n, tries)
		}
		r.wantReady()
		flush = true
		for end := time.Now().Add(time.Minute); flush && time.Now().Before(end); {
			commit()
			r.after(10 * time.Millisecond)
		}
		r.after(3 * time.Second)
		r.wantReady()
		if record := r.oneRecord(); !record.Outcome.Done() {
			t.Errorf("the flush within a renewal: %+v", record)
		}
	})
}

// endpoint returns the name of the n-th endpoint's chain.
func endpoint(n int) string {
	return "KUBE-SEP-" + strings.Map(func(digit rune) rune { return 'A' + digit - '0' }, fmt.Sprintf("%016d", n))
}

// canary returns the comment of an IPv4 table's canary.
func (r *rig) canary(table rules.TableName) string {
	r.t.Helper()
	c := r.tables()[rules.IPv4][table].Chain(canary.DefaultChain)
	if c == nil || len(c.Rules) != 1 {
		r.t.Fatalf("the canary is %v", c)
	}
	return c.Rules[0].Spec
}
