package daemon

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// youngPod is a host port as the portmap plugin writes it, in both families.
func (r *rig) youngPod() {
	r.t.Helper()
	for _, f := range rules.Families() {
		must(r.t, r.fake.As(77, "portmap").RestoreNoflush(f, section(rules.Nat, ":CNI-DN-young - [0:0]",
			"-A CNI-DN-young -p tcp --dport 8088 -j RETURN", "-A CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j CNI-DN-young")))
	}
}

// wantYoungPod fails unless the pod's rules stand, once each, or none of them does.
func (r *rig) wantYoungPod(when string, stands bool) {
	r.t.Helper()
	for _, f := range r.fake.Families() {
		want := 0
		if stands {
			want = 1
		}
		for _, rule := range []string{"-A CNI-DN-young -p tcp -m tcp --dport 8088 -j RETURN", "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8088 -j CNI-DN-young"} {
			if n := strings.Count(r.fake.SaveTable(f, rules.Nat), rule); n != want {
				r.t.Errorf("%s: %v nat holds %d times %q, want %d", when, f, n, rule, want)
			}
		}
	}
}

// TestTheLastMomentBeforeAFlush: an owner writes rules, and a flush follows at once, before any
// read. On nft the rules come back with the others.
func TestTheLastMomentBeforeAFlush(t *testing.T) {
	for _, s := range scenario.All() {
		if !s.On(iptables.NFT) {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				if s.Prepare != nil {
					must(t, s.Prepare(t.Context(), r.programs()))
					r.after(20 * time.Second)
				}
				r.youngPod()
				must(t, s.Do(t.Context(), r.programs()))
				r.after(20 * time.Second)
				saved := strings.Contains(s.Command, "restore")
				r.wantYoungPod("after "+s.Command, !saved || len(s.Lost) > 0)
				r.wantReady()
			})
		})
	}
}

// TestTheLastMomentIsNotHalfAFlush: what an owner writes between two commands of a flush is its
// own, and the state between them is not learned.
func TestTheLastMomentIsNotHalfAFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		want := r.d.Status().Generation
		for _, f := range rules.Families() {
			for _, table := range []rules.TableName{rules.Mangle, rules.Filter, rules.Nat} {
				must(t, r.fake.Flush(f, table, ""))
				r.after(5 * time.Millisecond)
				must(t, r.fake.DeleteChains(f, table))
			}
		}
		r.after(20 * time.Second)
		r.wantReady()
		if got := r.d.Status().Generation; got.ID != want.ID {
			t.Errorf("the generation is %+v, want %+v", got, want)
		}
	})
}

// TestTheLastMomentInAPause: the rules of the last moment before a flush are in the generation that
// the end of a pause puts back, and in the one that observe mode keeps.
func TestTheLastMomentInAPause(t *testing.T) {
	for _, mode := range []api.Mode{api.Heal, api.Observe} {
		t.Run(string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{mode: mode})
				rulesBefore := r.d.Status().Generation.Rules
				if mode == api.Heal {
					must(t, r.d.pauseFor(t, time.Minute))
				}
				r.youngPod()
				must(t, r.fake.FlushRuleset())
				r.settled()
				r.wantYoungPod("in the pause", false)
				if mode == api.Observe {
					if record := r.oneRecord(); record.Outcome != api.WaitingObserve {
						t.Errorf("the record is %+v", record)
					}
					if got := r.d.Status().Generation.Rules; got != rulesBefore+4 {
						t.Errorf("the generation has %d rules, want %d and the pod's four", got, rulesBefore)
					}
					return
				}
				r.after(2 * time.Minute)
				r.wantYoungPod("after the pause", true)
			})
		})
	}
}

// TestTheLastMomentThatWasMissed: where the kernel dropped notifications, the last read counts.
func TestTheLastMomentThatWasMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		r.youngPod()
		must(t, r.fake.FlushRuleset())
		r.fake.ForgetTakings()
		r.settled()
		r.wantYoungPod("after the flush", false)
		r.wantReady()
	})
}
