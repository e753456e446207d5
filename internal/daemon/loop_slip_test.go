package daemon

import (
	"context"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A slipping is a kernel that another process writes to when a session begins.
type slipping struct {
	*iptablestest.Fake
	write func()
}

func (s *slipping) Begin(ctx context.Context) (iptables.Session, error) {
	if s.write != nil {
		write := s.write
		s.write = nil
		write()
	}
	return s.Fake.Begin(ctx)
}

// TestSeenFirstByAWrite: the read of a renewal is the first to show a loss under intact marks.
// canaryd heals it anyway. A jump that was deleted by name just before a renewal or a replay
// has its grace, and is restored.
func TestSeenFirstByAWrite(t *testing.T) {
	renewal := func(r *rig, arm func()) {
		arm()
		r.write(rules.Mangle, "-A KUBE-IPTABLES-HINT -j RETURN")
	}
	flush := func(r *rig, arm func()) {
		// Without kube-proxy the replay requests no sync, and nothing else causes an
		// examination.
		for _, table := range protect.Always() {
			r.write(table, ":KUBE-PROXY-CANARY - [0:0]", "-X KUBE-PROXY-CANARY")
		}
		r.after(20 * time.Second)
		arm()
		must(r.t, r.fake.Flush(rules.IPv4, rules.Filter, ""))
	}
	for _, test := range []struct {
		name  string
		do    func(r *rig, arm func()) // causes a write, once armed
		slips string                   // line of another process for nat, just before
	}{
		{"emptied before a renewal", renewal, "-F KUBE-SERVICES"},
		{"jumpsDeleted before a renewal", renewal, "-D OUTPUT " + hostport},
		{"jumpsDeleted before a replay", flush, "-D OUTPUT " + hostport},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				kernel := &slipping{Fake: loadedFake(t, backend)}
				r := run(t, kernel.Fake, setup{kernel: kernel})
				r.after(20 * time.Second)
				before := r.tables()[rules.IPv4][rules.Nat]
				test.do(r, func() { kernel.write = func() { r.write(rules.Nat, test.slips) } })
				r.after(20 * time.Second)
				if kernel.write != nil {
					t.Fatal("nothing was written")
				}
				r.wantReady()
				got := r.tables()[rules.IPv4][rules.Nat]
				for _, chain := range []string{"KUBE-SERVICES", "OUTPUT"} {
					if diff := cmp.Diff(texts(before.Chain(chain)), texts(got.Chain(chain))); diff != "" {
						t.Errorf("%s is not as it was (-want +got):\n%s", chain, diff)
					}
				}
			})
		})
	}
}

// TestJumpDeletedBeforeTheProof: canaryd restores a jump, and another process deletes it by
// name before the proof. canaryd still knows it, and restores it again after the grace. (On
// legacy the lock keeps other processes out until the proof.)
func TestJumpDeletedBeforeTheProof(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		r := run(t, fake, setup{})
		r.after(20 * time.Second)
		before := texts(r.tables()[rules.IPv4][rules.Nat].Chain("OUTPUT"))
		var armed atomic.Bool
		var deletions atomic.Int64
		fake.OnCommit(func(c nft.Commit) {
			if c.PID == uint32(os.Getpid()) && armed.CompareAndSwap(true, false) {
				deletions.Add(1)
				r.write(rules.Nat, "-D OUTPUT "+hostport)
			}
		})
		r.write(rules.Nat, "-D OUTPUT "+hostport)
		armed.Store(true)
		r.after(time.Minute)
		if n := deletions.Load(); n != 1 {
			t.Fatalf("the jump was deleted %d times before a proof", n)
		}
		r.wantReady()
		if diff := cmp.Diff(before, texts(r.tables()[rules.IPv4][rules.Nat].Chain("OUTPUT"))); diff != "" {
			t.Errorf("OUTPUT is not as it was (-want +got):\n%s", diff)
		}
	})
}

// texts returns a chain's rules without canaryd's own.
func texts(c *rules.Chain) []string {
	var specs []string
	for _, rule := range c.Rules {
		if !canary.IsMark(rule) {
			specs = append(specs, rule.Spec)
		}
	}
	return specs
}

// TestConfirmedAfterARestart: a run finds everything as the last one left it, and learns
// nothing. It still stores each minute that the rules are in force.
func TestConfirmedAfterARestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := start(t, backend, setup{store: openStore(t, dir, id)})
		first.stop()
		r := run(t, first.fake, setup{store: openStore(t, dir, id)})
		r.after(time.Hour)
		known, _, err := openStore(t, dir, id).LoadState()
		must(t, err)
		if age := bubbleUptime() - known.Uptime; age > 2*confirmEvery {
			t.Errorf("what is on disk was confirmed %s ago", age)
		}
	})
}

// TestWarEndedByTheOwner: the owner restores the last loss during a pause. That ends a
// contention too.
func TestWarEndedByTheOwner(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		var held string // nat with the present marks
		for range 100 {
			held = r.fake.Save(rules.IPv4)
			r.flushNat()
			r.after(40 * time.Millisecond)
			if !r.d.Status().LossSince.IsZero() {
				break
			}
		}
		if s := r.d.Status(); !s.Contended || s.LossSince.IsZero() {
			t.Fatalf("contended: %t, loss since %v", s.Contended, s.LossSince)
		}
		must(t, r.fake.Restore(rules.IPv4, held))
		r.pause(time.Minute)
		r.after(2 * time.Minute)
		r.wantReady()
		if r.d.Status().Contended {
			t.Error("contended for ever")
		}
	})
}

// TestFlushedBeforeTheFirstProof: a table gets its first marks, and another process flushes it
// before the proof. The content at the planting is the generation, and canaryd restores it.
func TestFlushedBeforeTheFirstProof(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake, flushed := loadedFake(t, backend), false
		step := func(what string, _ iptables.Session) {
			if what == "restored" && !flushed {
				flushed = true
				must(t, fake.Bypassing().Flush(rules.IPv4, rules.Filter, ""))
			}
		}
		before := (&rig{t: t, fake: fake}).tables()
		r := run(t, fake, setup{kernel: stepping{fake, step}})
		r.after(5 * time.Second)
		if f := r.oneRecord(); f.Outcome != reload.Proved || f.Kind != canary.Emptied || f.Lost.Rules == 0 {
			t.Errorf("the record is %s, %s, with %d rules", f.Kind, f.Outcome, f.Lost.Rules)
		}
		r.wantBack(before, r.tables())
	})
}
