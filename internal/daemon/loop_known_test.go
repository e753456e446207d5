package daemon

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// knownFor returns the age of the last examination.
func (r *rig) knownFor() time.Duration {
	r.t.Helper()
	at := r.d.Status().LastKnown
	if at.IsZero() {
		r.t.Fatal("the last examination is unknown")
	}
	return time.Since(at).Round(time.Millisecond)
}

// oldest returns the greatest age of the last examination within that time.
func (r *rig) oldest(within time.Duration) time.Duration {
	r.t.Helper()
	var most time.Duration
	for range within / (500 * time.Millisecond) {
		r.after(500 * time.Millisecond)
		most = max(most, r.knownFor())
	}
	return most
}

// TestQuietIsNotBlind: while nothing happens, the last examination stays young. On nft each
// look shows that no process wrote; on legacy canaryd walks each 30 s.
func TestQuietIsNotBlind(t *testing.T) {
	for backend, most := range map[iptables.Backend]time.Duration{iptables.NFT: 1100 * time.Millisecond, iptables.Legacy: 31100 * time.Millisecond} {
		t.Run(string(backend), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, backend, setup{})
				if got := r.oldest(10 * time.Minute); got > most || got < most-1200*time.Millisecond {
					t.Errorf("after a quiet time the last examination is up to %s old, want about %s", got, most)
				}
				must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
				r.settled()
				r.wantReady()
				if got := r.knownFor(); got > 2*time.Second {
					t.Errorf("after a flush was healed the last examination is %s old", got)
				}
			})
		})
	}
}

// TestLossIsNotBlind: canaryd may not restore lost rules. It keeps knowing that they are lost.
func TestLossIsNotBlind(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		if got := r.oldest(5 * time.Minute); got > 32*time.Second {
			t.Errorf("beside a loss the last examination is up to %s old", got)
		}
		if r.d.Status().LossSince.IsZero() {
			t.Error("nothing is lost any more")
		}
	})
}

// TestBusyIsNotBlind: a process writes all the time, and walks are costly. The last examination
// stays younger than the alert's limit.
func TestBusyIsNotBlind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startDear(t, setup{})
		var most time.Duration
		for n := range 6000 {
			r.endpoint(n, true)
			r.after(10 * time.Millisecond)
			most = max(most, r.knownFor())
		}
		// IPv6 is quiet.
		if most > 32*time.Second {
			t.Errorf("beside a busy writer the last examination was %s old", most)
		}
	})
}

// TestBlind: a family or a table cannot be read, or a cleanup has removed the marks. The last
// examination grows old, and is young again afterwards.
func TestBlind(t *testing.T) {
	refused := errors.New("operation not permitted")
	for name, blind := range map[string]func(f *iptablestest.Fake, yes bool){
		"probes are refused": func(f *iptablestest.Fake, yes bool) { f.FailProbes(map[bool]error{true: refused}[yes]) },
		"reads are refused":  func(f *iptablestest.Fake, yes bool) { f.FailReads(map[bool]error{true: refused}[yes]) },
		"one table cannot be read": func(f *iptablestest.Fake, yes bool) {
			f.DropTableFromReads(rules.IPv6, rules.Filter, map[bool]error{true: refused}[yes])
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				blind(r.fake, true)
				must(t, r.programs().RestoreNoflush(t.Context(), rules.IPv4, scenario.NewService))
				must(t, r.programs().RestoreNoflush(t.Context(), rules.IPv6, "*filter\n:KUBE-NEW - [0:0]\nCOMMIT\n"))
				r.after(5 * time.Minute)
				if got := r.knownFor(); got < 4*time.Minute {
					t.Errorf("after five blind minutes the last examination is %s old", got)
				}
				blind(r.fake, false)
				r.after(35 * time.Second)
				if got := r.knownFor(); got > 31*time.Second {
					t.Errorf("when everything can be read again the last examination is %s old", got)
				}
			})
		})
	}
	t.Run("cleanup", func(t *testing.T) {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{})
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
			r.after(5 * time.Minute)
			if got := r.knownFor(); got < 4*time.Minute {
				t.Errorf("five minutes after a cleanup the last examination is %s old", got)
			}
		})
	})
}
