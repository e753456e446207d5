package daemon

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A steppingNative calls step before each read and write of native tables.
type steppingNative struct {
	*fakeNative
	step func()
}

func (k steppingNative) Genid() (uint32, error) { k.step(); return k.fakeNative.Genid() }

func (k steppingNative) Hear(genid uint32) ([]native.Commit, bool, error) {
	k.step()
	return k.fakeNative.Hear(genid)
}

func (k steppingNative) Follow(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	k.step()
	return k.fakeNative.Follow(wanted)
}

func (k steppingNative) Capture(wanted func(nft.Table) bool) (*native.Ruleset, error) {
	k.step()
	return k.fakeNative.Capture(wanted)
}

func (k steppingNative) Write(genid uint32, repairs []native.Repair, witnesses map[tableid.Family]string) ([]string, error) {
	k.step()
	return k.fakeNative.Write(genid, repairs, witnesses)
}

func (k steppingNative) TakeDrill(genid uint32, tables []*native.Table, kind native.Verdict) (time.Time, error) {
	k.step()
	return k.fakeNative.TakeDrill(genid, tables, kind)
}

// TestKilledInNativeDrill: a daemon is killed at each step of a drill of native tables. The next
// one removes the drill's tables, and reports no flush. Of the drill it says nothing or that it has
// not passed, unless the drill's loss was over.
func TestKilledInNativeDrill(t *testing.T) {
	seen := map[int]bool{} // by the number of tables that were left behind
	for step, fell := 0, true; fell; step++ {
		fell = false
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var armed, dead atomic.Bool
				var left atomic.Int32
				left.Store(int32(step + 1))
				grave := make(chan struct{})
				k := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c"))
				fake, dir, natives := iptablestest.NewFake(iptables.NFT), t.TempDir(), t.TempDir()
				s := setup{guarded: k, journal: dir, store: openStore(t, t.TempDir(), identity(iptables.NFT)), nativeStore: nativestore.New(natives, nativestore.Identity{})}
				s.nativeStep = func() {
					if armed.Load() && left.Add(-1) == 0 {
						dead.Store(true)
					}
					if dead.Load() {
						<-grave
					}
				}
				first := startOn(t, fake, s)
				t.Cleanup(func() { close(grave) })
				armed.Store(true)
				go func() { _, _ = first.d.Drill(t.Context(), api.DrillRequest{}) }()
				first.after(400 * time.Millisecond)
				armed.Store(false)
				if fell = dead.Load(); !fell {
					return
				}
				seen[k.drillTables()] = true

				next := run(t, fake, setup{guarded: k, journal: dir, store: openStore(t, t.TempDir(), identity(iptables.NFT)), nativeStore: nativestore.New(natives, nativestore.Identity{})})
				next.settled()
				next.wantReady()
				if n := k.drillTables(); n != 0 {
					t.Errorf("%d tables of the drill are left", n)
				}
				k.wantNative(t, tableOf(proxyTable, "a", "b"))
				k.wantNative(t, tableOf(dockerTable, "c"))
				for _, f := range next.records(0) {
					if f.Drill != api.DrillCanary || f.Open() {
						t.Errorf("the record: %+v", f)
					}
				}
				if m := next.metrics("flush_events"); m["flush_events_total"] != 0 {
					t.Errorf("metrics: %v", m)
				}
				if reply := next.drill(api.DrillRequest{}); reply.Result != api.DrillPassed {
					t.Errorf("the next drill: %+v", reply)
				}
				k.flushRuleset()
				next.settled()
				next.wantReady()
				if f, flushed := next.d.Status().LastFlush(); !flushed || len(f.Native) != 2 {
					t.Errorf("the next flush: %+v", f)
				}
			})
		})
		if step > 100 {
			t.Fatal("the drill does not end")
		}
	}
	if !seen[0] || !seen[1] {
		t.Errorf("the daemon was never killed with, or without, a table of the drill: %v", seen)
	}
}
