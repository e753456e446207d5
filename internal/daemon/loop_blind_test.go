package daemon

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestLossStaysVisibleWhileNothingCanBeRead: reads fail after a loss. The loss stays open and
// visible, and canaryd heals it once it can read, also if only some tables are readable at
// first.
func TestLossStaysVisibleWhileNothingCanBeRead(t *testing.T) {
	for _, test := range []struct {
		name  string
		chain string // the flushed chain of nat; empty: all
		fail  func(*iptablestest.Fake, error)
	}{
		{"reads", "", (*iptablestest.Fake).FailReads},
		{"probes and reads", "", func(f *iptablestest.Fake, err error) { f.FailReads(err); f.FailProbes(err) }},
		{"reads, under standing marks", "KUBE-SERVICES", (*iptablestest.Fake).FailReads},
		{"probes and reads, under standing marks", "KUBE-SERVICES", func(f *iptablestest.Fake, err error) { f.FailReads(err); f.FailProbes(err) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				before := r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")
				// Restores fail too, so that canaryd can only see the loss.
				r.fake.FailRestores(-1, iptables.ReasonOther)
				must(t, r.fake.Flush(rules.IPv4, rules.Nat, test.chain))
				r.after(time.Second)
				lost := r.d.Status()
				test.fail(r.fake, errInjected)
				must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":ELSE - [0:0]"))) // another process
				r.after(10 * time.Second)
				s := r.d.Status()
				if got := s.Families[rules.IPv4][rules.Nat]; got != canary.Emptied || !s.LossSince.Equal(lost.LossSince) || s.LossSince.IsZero() {
					t.Errorf("%s since %v while nothing can be read; before it was emptied since %v", got, s.LossSince, lost.LossSince)
				}
				r.wantNotReady("nat is emptied")

				r.fake.FailRestores(0, "")
				r.fake.DropTableFromReads(rules.IPv4, rules.Nat, errNative)
				test.fail(r.fake, nil)
				r.after(40 * time.Second)
				if s := r.d.Status(); s.LossSince.IsZero() || s.Families[rules.IPv4][rules.Nat] != canary.Emptied {
					t.Errorf("%s since %v while nat cannot be read", s.Families[rules.IPv4][rules.Nat], s.LossSince)
				}
				r.fake.DropTableFromReads(rules.IPv4, rules.Nat, nil)
				r.after(31 * time.Second)
				r.wantReady()
				if diff := cmp.Diff(before, r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")); diff != "" {
					t.Errorf("KUBE-SERVICES is not as it was (-want +got):\n%s", diff)
				}
				if got := r.oneRecord(); got.Outcome != reload.Proved {
					t.Errorf("the record says %s", got.Outcome)
				}
			})
		})
	}
}

// A blinding is a kernel whose next full probes fail.
type blinding struct {
	*iptablestest.Fake
	fails atomic.Int64 // the number of probes that fail
}

func (b *blinding) Probe(ctx context.Context, f rules.Family, places []iptables.Place) (iptables.Probed, error) {
	if b.fails.Add(-1) >= 0 {
		return iptables.Probed{}, errInjected
	}
	return b.Fake.Probe(ctx, f, places)
}

// TestWriterIsNotForgottenByAFailedProbe: another process writes, and the probes fail. The
// change is pending since the write until a probe works.
func TestWriterIsNotForgottenByAFailedProbe(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		kernel := &blinding{Fake: loadedFake(t, backend)}
		r := run(t, kernel.Fake, setup{kernel: kernel})
		r.after(5 * time.Second)
		r.wantReady()
		kernel.fails.Store(1000)
		wrote := time.Now()
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(3 * time.Second)
		if since := r.d.Status().LearningPendingSince; !since.Equal(wrote) {
			t.Errorf("pending since %v, written at %v", since, wrote)
		}
		kernel.fails.Store(0)
		r.after(3 * time.Second)
		r.wantReady()
		if since := r.d.Status().LearningPendingSince; !since.IsZero() {
			t.Errorf("still pending since %v", since)
		}
	})
}

// TestWhatFollowsAReplayFollowsAProofThatCameLate: the rules are back, and the read that should
// prove them fails. After a later proof the record says so, kube-proxy has the last word, and
// flows that began meanwhile end, each once.
func TestWhatFollowsAReplayFollowsAProofThatCameLate(t *testing.T) {
	for _, test := range []struct {
		name       string
		blind, see func(*iptablestest.Fake)
	}{
		{"no table can be read",
			func(f *iptablestest.Fake) { f.FailReads(errInjected) },
			func(f *iptablestest.Fake) { f.FailReads(nil) }},
		{"nat cannot be read",
			func(f *iptablestest.Fake) { f.DropTableFromReads(rules.IPv4, rules.Nat, errNative) },
			func(f *iptablestest.Fake) { f.DropTableFromReads(rules.IPv4, rules.Nat, nil) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				tracker := &flows{held: begunMeanwhile()}
				r := start(t, backend, setup{flows: tracker})
				before, left := r.tables(), leftBy(t, backend, "flush-nat")
				r.fake.BeforeRestore(func() {
					test.blind(r.fake)
					r.fake.BeforeRestore(nil)
				})
				r.flushNat()
				r.after(5 * time.Second)
				if s := r.d.Status(); s.LossSince.IsZero() || s.Healthy {
					t.Error("the loss is over without a proof")
				}
				if asked, nudged := r.followed(tracker); asked != 0 || nudged != 0 {
					t.Errorf("%d searches for flows and %d nudges before the proof", asked, nudged)
				}
				test.see(r.fake)
				r.after(time.Minute)
				if got := r.oneRecord(); got.Outcome != reload.Proved {
					t.Errorf("the record says %s", got.Outcome)
				}
				if asked, nudged := r.followed(tracker); asked != 1 || nudged != 1 {
					t.Errorf("%d searches for flows and %d nudges, want one of each", asked, nudged)
				}
				if got := r.metrics("replays_total")["replays_total{family=ipv4,result=proved}"]; got != 1 {
					t.Errorf("%v proved replays", got)
				}
				r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
				r.settled()
				r.wantBack(before, left)
			})
		})
	}
}

// followed counts the consequences of replays: searches for flows, and deletions of
// kube-proxy's canary in mangle.
func (r *rig) followed(tracker *flows) (asked, nudged int) {
	_, families := tracker.left()
	for _, payload := range r.fake.Payloads(rules.IPv4) {
		if strings.Contains(payload, "*mangle") && strings.Contains(payload, "-X KUBE-PROXY-CANARY") {
			nudged++
		}
	}
	return len(families), nudged
}

// TestErrorsInTurnsDoNotFillTheLog: the kernel refuses for two reasons in turn.
func TestErrorsInTurnsDoNotFillTheLog(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		fail := map[string]func(error){
			"probes": r.fake.FailProbes, "reads": r.fake.FailReads,
			"a table": func(err error) { r.fake.DropTableFromReads(rules.IPv4, rules.Nat, err) },
		}
		for name, fails := range fail {
			before := r.logged("could not be ")
			for i := range 120 {
				fails(fmt.Errorf("refused, for the reason %d", i%2))
				r.write(rules.Nat, fmt.Sprintf("-A PREROUTING -s 198.51.100.%d -j ACCEPT", i))
				r.after(500 * time.Millisecond)
			}
			if n := r.logged("could not be ") - before; n < 1 || n > 6 {
				t.Errorf("%s: the log has %d lines of it in a minute, want one for each family in 30 s", name, n)
			}
			fails(nil)
			r.after(40 * time.Second)
			r.wantReady()
		}
	})
}
