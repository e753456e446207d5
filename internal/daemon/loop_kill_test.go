package daemon

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A killer ends a daemon as SIGKILL does, at a step of a guarded write. The daemon's lock is
// released, and it does nothing more.
type killer struct {
	armed atomic.Bool
	left  atomic.Int32           // steps until the end
	fell  atomic.Pointer[string] // the step that was not done
	grave chan struct{}          // closed at the end of the test
	// between runs after the first family is written; nil: nothing.
	between func()
}

// step returns when the daemon may do the step.
func (k *killer) step(what string, s iptables.Session) {
	if do := k.between; do != nil && k.armed.Load() && what == "written" {
		k.between = nil
		do()
	}
	if k.armed.Load() && k.left.Add(-1) == 0 {
		k.fell.Store(&what)
		if s != nil {
			_ = s.Close() // the kernel does that for a dead process
		}
	}
	if k.fell.Load() != nil {
		<-k.grave
	}
}

// A death is a daemon's occupation when it is killed.
type death struct {
	name  string
	first bool         // it plants marks for the first time
	do    func(r *rig) // makes it write otherwise
	flush string       // the scenario of do; empty: none
	// next to: another process writes between the writes of the two families, so that canaryd
	// must read again; nft only.
	beside bool
	// only is the backend in make test, and make test-large has the other one. The steps of
	// both replays are alike.
	only iptables.Backend
}

// TestKilled: a daemon is killed at each step of its writes. The next one knows these writes as
// canaryd's own: nothing is lost, only real flushes are reported, and no mark is doubled.
func TestKilled(t *testing.T) {
	flushAll := scenario.All()[0]
	for _, at := range []death{
		{name: "replay of nat", do: (*rig).flushNat, flush: "flush-nat", only: iptables.Legacy},
		{name: "replay of everything", do: func(r *rig) { must(r.t, flushAll.Do(r.t.Context(), r.programs())) }, flush: flushAll.Name, only: iptables.NFT},
		{name: "replay beside a writer", do: func(r *rig) { must(r.t, flushAll.Do(r.t.Context(), r.programs())) }, flush: flushAll.Name, beside: true},
		{name: "renewal", do: func(r *rig) { must(r.t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService)) }},
		{name: "first planting", first: true},
		{name: "drill", do: func(r *rig) { go func() { _, _ = r.d.Drill(r.t.Context(), api.DrillRequest{}) }() }},
	} {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			if at.beside && backend == iptables.Legacy {
				continue // the writer would wait for the lock
			}
			if at.only == "" && testkit.IsLarge() || at.only != "" && (backend == at.only) == testkit.IsLarge() {
				continue
			}
			steps, asked := 0, false
			for fell := true; fell; {
				fell, asked = false, false // false remains if -run names another subtest
				t.Run(fmt.Sprintf("%s/%s/%d", at.name, backend, steps), func(t *testing.T) {
					asked = true
					synctest.Test(t, func(t *testing.T) { fell = at.killed(t, backend, steps) })
				})
				steps++
			}
			t.Logf("%s on %s: killed at %d steps", at.name, backend, steps-1)
			if asked && steps < 6 {
				t.Errorf("%s on %s has only %d steps", at.name, backend, steps-1)
			}
		}
	}
}

// killed kills a daemon at that step. It returns false if there is no such step.
func (at death) killed(t *testing.T, backend iptables.Backend, step int) bool {
	dir, id := t.TempDir(), identity(backend)
	k := &killer{grave: make(chan struct{})}
	k.left.Store(int32(step + 1))
	k.armed.Store(at.first)
	fake := loadedFake(t, backend)
	first := run(t, fake, setup{store: openStore(t, dir, id), kernel: stepping{fake, k.step}})
	t.Cleanup(func() { close(k.grave) }) // after the next daemon ends, before this one
	before, foreign := first.tables(), leftBy(t, backend, at.flush)
	first.after(4 * time.Second)
	if !at.first {
		first.wantReady()
		if at.beside {
			k.between = func() {
				must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, ":passing - [0:0]")))
			}
		}
		k.armed.Store(true)
		at.do(first)
		if at.flush == "" {
			before, foreign = first.tables(), first.tables()
		}
		first.after(4 * time.Second)
	}
	if k.fell.Load() == nil {
		return false
	}
	if at.beside && fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, "-X passing")) != nil && step > 5 {
		t.Error("nobody wrote in between")
	}
	lost := 0
	for f, now := range first.tables() {
		lost += len(scenario.Compare(scenario.Want{Protected: before[f], Foreign: now, Protects: first.d.cfg.Protection.Chain}, now))
	}

	r := run(t, fake, setup{store: openStore(t, dir, id)})
	r.settled()
	r.wantBack(before, foreign)
	r.wantMarksOnce()
	// The drill of a killed daemon is a record, and no flush.
	records, want := slices.DeleteFunc(r.records(0), func(f api.Flush) bool { return f.Drill != "" }), min(lost, 1)
	drills := len(r.records(0)) - len(records)
	if len(records) != want {
		t.Errorf("killed at %q, with %d things lost; the next daemon reports %d flushes", *k.fell.Load(), lost, len(records))
	}
	for _, record := range records {
		if record.Kind == canary.Replaced || record.Outcome != reload.Proved {
			t.Errorf("killed at %q; the next daemon reports a flush: %s, %s", *k.fell.Load(), record.Kind, record.Outcome)
		}
	}
	r.flushNat() // canaryd guards as ever
	r.settled()
	r.wantReady()
	if n := len(r.records(0)) - drills; n != want+1 {
		t.Errorf("%d flush records after one more flush, want %d", n, want+1)
	}
	return true
}

// wantMarksOnce fails unless every table has one canary with one rule, and no
// built-in chain has two witnesses.
func (r *rig) wantMarksOnce() {
	r.t.Helper()
	tables := r.tables()
	for _, f := range rules.Families() {
		for _, name := range protect.Always() {
			if tables[f][name].Chain(canary.DrillChain) != nil {
				r.t.Errorf("%s %s has a stand-in of a drill that is over", f, name)
			}
			if c := tables[f][name].Chain(canary.DefaultChain); c == nil || len(c.Rules) != 1 {
				r.t.Errorf("%s %s: the canary is %+v", f, name, c)
			}
			for _, chain := range rules.BuiltinChains(name) {
				marks := 0
				if c := tables[f][name].Chain(chain); c != nil {
					for _, rule := range c.Rules {
						if canary.IsMark(rule) {
							marks++
						}
					}
				}
				if marks > 1 {
					r.t.Errorf("%s %s %s has %d witnesses", f, name, chain, marks)
				}
			}
		}
	}
}
