package daemon

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// oneFamily returns a Fake with the scenarios' node in one family only.
func oneFamily(t *testing.T, backend iptables.Backend, f rules.Family) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend, f)
	must(t, scenario.Load(t.Context(), scenario.FakePrograms{Fake: fake}, f))
	return fake
}

// TestOneFamily: a node with one family is guarded as any other. Each story ends with all rules
// back.
func TestOneFamily(t *testing.T) {
	flush := func(r *rig, f rules.Family, table rules.TableName) { must(r.t, r.fake.Flush(f, table, "")) }
	for name, story := range map[string]func(r *rig, f rules.Family){
		"a flush": func(r *rig, f rules.Family) { flush(r, f, rules.Nat) },
		"of all tables": func(r *rig, f rules.Family) {
			for _, table := range []rules.TableName{rules.Filter, rules.Nat, rules.Mangle, "raw", "security"} {
				must(r.t, r.fake.RestoreNoflush(f, section(table, "-A OUTPUT -j ACCEPT")))
			}
			r.after(5 * time.Second)
			if r.fake.Info().Backend == iptables.NFT {
				must(r.t, r.fake.FlushRuleset())
				return
			}
			for _, table := range []rules.TableName{rules.Filter, rules.Nat, rules.Mangle, "raw", "security"} {
				flush(r, f, table)
			}
		},
		"in a pause": func(r *rig, f rules.Family) {
			r.pause(time.Minute)
			flush(r, f, rules.Nat)
			r.after(2 * time.Minute)
		},
		"under a held lock": func(r *rig, f rules.Family) {
			release := r.fake.HoldLock()
			must(r.t, r.fake.Bypassing().Flush(f, rules.Nat, ""))
			r.after(20 * time.Second)
			release()
			r.after(time.Minute)
		},
		"a jump by name": func(r *rig, f rules.Family) {
			must(r.t, r.fake.RestoreNoflush(f, section(rules.Nat, "-D PREROUTING "+portals)))
			r.after(5 * time.Second)
			if s := r.d.Status(); s.Healthy || len(s.Flushes) == 0 || s.Flushes[0].Outcome != api.WaitingOwner {
				r.t.Errorf("%s, records %+v", s.Headline, s.Flushes)
			}
			r.after(time.Minute)
		},
		"a policy": func(r *rig, f rules.Family) {
			flush(r, f, rules.Filter)
			must(r.t, r.fake.SetPolicy(f, rules.Filter, "OUTPUT", "DROP"))
			r.after(10 * time.Second)
			if drops := r.d.Status().PolicyDrops; len(drops) != 1 || drops[0].Flush == "" {
				r.t.Errorf("policies %+v", drops)
			}
			must(r.t, errorOf(r.d.Dismiss(r.t.Context())))
		},
		"a drill": func(r *rig, _ rules.Family) {
			must(r.t, errorOf(r.d.Drill(r.t.Context(), api.DrillRequest{})))
			r.after(time.Minute)
			must(r.t, errorOf(r.d.Drill(r.t.Context(), api.DrillRequest{ForReal: true})))
		},
	} {
		for _, f := range rules.Families() {
			t.Run(fmt.Sprintf("%s, %s", name, f), func(t *testing.T) {
				oneBackend(t, func(t *testing.T, backend iptables.Backend) {
					dir := t.TempDir()
					r := startOn(t, oneFamily(t, backend, f), setup{store: openStore(t, dir, identity(backend)), journal: dir})
					r.after(20 * time.Second)
					before := r.tables()
					story(r, f)
					r.after(time.Minute)
					r.wantReady()
					now := r.tables()
					want := scenario.Want{Protected: before[f], Foreign: now[f], Protects: r.d.cfg.Protection.Chain, MatchesPreset: r.d.cfg.Protection.Rule}
					for _, line := range scenario.Compare(want, now[f]) {
						t.Error(line)
					}
					if n := len(r.d.Status().Flushes); n == 0 {
						t.Error("no record")
					}
				})
			})
		}
	}
}

// TestTheOtherFamilyIsGone: canaryd restarts on a node that has lost IPv6, with an open record
// of both families. The record closes with the remaining family.
func TestTheOtherFamilyIsGone(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				r := start(t, backend, setup{store: openStore(t, dir, identity(backend)), journal: dir})
				r.after(20 * time.Second)
				r.pause(time.Hour)
				for _, f := range rules.Families() {
					must(t, r.fake.Flush(f, rules.Nat, ""))
				}
				r.after(10 * time.Second)
				was := r.oneRecord()
				left := r.fake.Save(rules.IPv4)
				r.stop()

				fake := iptablestest.NewFake(backend, rules.IPv4)
				must(t, fake.Restore(rules.IPv4, left))
				r = run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
				r.after(10 * time.Second)
				must(t, errorOf(r.d.Resume(t.Context())))
				r.after(time.Minute)
				r.wantReady()
				if got := r.oneRecord(); got.ID != was.ID || got.Outcome != reload.Proved || got.Open() {
					t.Errorf("the record is %+v", got)
				}
			})
		})
	}
}
