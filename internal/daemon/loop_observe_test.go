package daemon

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// readSteps is a stepping kernel that also reports unguarded reads.
type readSteps struct{ stepping }

func (k readSteps) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	k.step("unguarded read", nil)
	return k.stepping.Read(ctx, f)
}

// A slip is a second flush, during a step of observe mode after a first flush.
type slip struct {
	step  int
	table rules.TableName
	kill  bool // canaryd is killed at that step too
}

// TestObserveFlushedBetweenTwoReads: observe mode reads the losses of a flush of nat, and
// another process flushes a table at each of the next steps. All losses are recorded, and the
// next canaryd, in heal mode, restores all of them. make test tries each pair of a table, a
// backend and a death; make test-large tries the others.
func TestObserveFlushedBetweenTwoReads(t *testing.T) {
	for _, kill := range []bool{false, true} {
		for _, table := range []rules.TableName{rules.Filter, rules.Nat} {
			for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
				if ordinary := (backend == iptables.Legacy) == (kill != (table == rules.Nat)); ordinary == testkit.IsLarge() {
					continue
				}
				steps := 0
				for fell := true; fell; steps++ {
					fell = false // false remains if -run names another subtest
					t.Run(fmt.Sprintf("%s/%s/kill=%t/%d", table, backend, kill, steps), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) { fell = slip{steps, table, kill}.observed(t, backend) })
					})
				}
				t.Logf("%s on %s: %d steps", table, backend, steps-1)
			}
		}
	}
}

// observed returns false if there is no such step.
func (at slip) observed(t *testing.T, backend iptables.Backend) bool {
	dir, id := t.TempDir(), identity(backend)
	fake := loadedFake(t, backend)
	k := &killer{grave: make(chan struct{})}
	var armed atomic.Bool
	left := at.step
	fell := ""
	step := func(what string, s iptables.Session) {
		if armed.Load() && fell == "" {
			if left--; left < 0 {
				fell = what
				// A flush that waited for the lock would wait for the open session.
				must(t, fake.Bypassing().Flush(rules.IPv4, at.table, ""))
				k.armed.Store(at.kill)
				k.left.Store(1)
			}
		}
		k.step(what, s)
	}
	r := run(t, fake, setup{mode: api.Observe, store: openStore(t, dir, id), kernel: readSteps{stepping{fake, step}}})
	t.Cleanup(func() { close(k.grave) })
	r.after(4 * time.Second)
	r.wantReady()
	before := r.tables()
	r.flushNat()
	armed.Store(true)
	r.after(10 * time.Second)
	if fell == "" {
		return false
	}
	foreign := r.tables()
	if !at.kill {
		r.wantNotReady("ipv4 nat")
		at.recorded(t, r, fell)
		r.stop()
	}

	next := run(t, fake, setup{store: openStore(t, dir, id)})
	next.settled()
	next.wantBack(before, foreign)
	return true
}

// recorded fails unless the records have all losses of the flushes.
func (at slip) recorded(t *testing.T, r *rig, fell string) {
	t.Helper()
	lost := map[rules.TableName]int{}
	for _, f := range r.records(0) {
		if f.Outcome != api.WaitingObserve {
			t.Errorf("flushed at %q: a record is %s", fell, f.Outcome)
		}
		for _, table := range f.Lost.Tables {
			lost[table.Table] = max(lost[table.Table], table.Rules)
		}
	}
	control := start(t, r.fake.Info().Backend, setup{mode: api.Observe})
	want := map[rules.TableName]int{}
	for _, table := range []rules.TableName{rules.Nat, at.table} {
		must(t, control.fake.Flush(rules.IPv4, table, ""))
		control.after(5 * time.Second)
	}
	for _, f := range control.records(0) {
		for _, table := range f.Lost.Tables {
			want[table.Table] = max(want[table.Table], table.Rules)
		}
	}
	if diff := cmp.Diff(want, lost); diff != "" {
		t.Errorf("flushed at %q: the records have other rules than were lost (-want +got):\n%s", fell, diff)
	}
}

// TestObserveBesideALock: another process holds the xtables lock, so canaryd can plant no mark.
// It records the loss anyway.
func TestObserveBesideALock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.Legacy, setup{mode: api.Observe})
		r.flushNat()
		release := r.fake.HoldLock()
		r.after(10 * time.Second)
		r.wantNotReady("ipv4 nat is emptied")
		r.wantLog(`"Rules were lost"`)
		if got := r.metrics("flush_events_total")["flush_events_total"]; got != 1 {
			t.Errorf("%v flushes are counted while the lock is held", got)
		}
		release()
		r.after(5 * time.Second)
		if f := r.oneRecord(); f.Outcome != api.WaitingObserve || f.Lost.Rules == 0 {
			t.Errorf("the record is %s with %d rules", f.Outcome, f.Lost.Rules)
		}
	})
}
