package daemon

import (
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// onlyFilter returns a node with only kubelet's filter rules of IPv4.
func onlyFilter(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend)
	must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter,
		":KUBE-FIREWALL - [0:0]", "-A INPUT -j KUBE-FIREWALL", "-A KUBE-FIREWALL -s 192.0.2.1/32 -j DROP")))
	return fake
}

// wantExist fails unless exactly these tables exist.
func (r *rig) wantExist(what string, v4, v6 []rules.TableName) {
	r.t.Helper()
	for f, want := range map[rules.Family][]rules.TableName{rules.IPv4: v4, rules.IPv6: v6} {
		got := slices.Sorted(maps.Keys(r.tables()[f]))
		if diff := cmp.Diff(slices.Sorted(slices.Values(want)), got); diff != "" {
			r.t.Errorf("%s, other tables of %s exist (-want +got):\n%s", what, f, diff)
		}
	}
}

// marked returns the tables that hold a canary.
func (r *rig) marked(f rules.Family) []rules.TableName {
	r.t.Helper()
	var names []rules.TableName
	for name, table := range r.tables()[f] {
		if table.Chain(canary.DefaultChain) != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// TestSparesTables: on legacy canaryd makes no table without protected rules. On nft, where an
// empty table costs almost nothing, all tables have a canary.
func TestSparesTables(t *testing.T) {
	filter := []rules.TableName{rules.Filter}
	t.Run("nft", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := run(t, onlyFilter(t, iptables.NFT), setup{})
			r.settled()
			r.wantExist("on nft", protect.Always(), protect.Always())
		})
	})
	t.Run("legacy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dir, id := t.TempDir(), identity(iptables.Legacy)
			fake := onlyFilter(t, iptables.Legacy)
			for _, mode := range []api.Mode{api.Heal, api.Observe, api.Heal} {
				r := run(t, fake, setup{mode: mode, store: openStore(t, dir, id)})
				r.after(5 * time.Second)
				r.wantBare() // but kubelet's own
				r.wantExist("after a start", filter, nil)
				must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
				r.after(5 * time.Second)
				r.wantExist("after a flush", filter, nil)
				if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: r.d.Status().Generation.ID}); err != nil {
					t.Error(err)
				}
				r.after(5 * time.Second)
				r.wantBare()                                                      // but kubelet's own
				r.write(rules.Filter, "-A KUBE-FIREWALL -s 192.0.2.2/32 -j DROP") // has the marks renewed
				r.after(5 * time.Second)
				r.wantExist("after a renewal", filter, nil)
				if n := len(r.records(0)); n != 1 {
					t.Errorf("%d flush records, want 1", n)
				}
				r.after(5 * time.Minute)
				r.wantBare() // but kubelet's own
				if got := r.knownFor(); got > 32*time.Second {
					t.Errorf("the last examination is %s old", got)
				}
				r.stop()
			}
			r := run(t, fake, setup{})
			r.settled()
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: true}))
			r.wantExist("after a cleanup", filter, nil)
		})
	})
}

// TestTableComesIntoBeing: on legacy another program makes a table later, with or without a
// hint. It gets its marks then, and is guarded. Its former lack of marks is no loss.
func TestTableComesIntoBeing(t *testing.T) {
	for _, deaf := range []bool{false, true} {
		for _, f := range rules.Families() {
			for _, mode := range []api.Mode{api.Heal, api.Observe} {
				synctest.Test(t, func(t *testing.T) {
					r := run(t, onlyFilter(t, iptables.Legacy), setup{deaf: deaf, mode: mode})
					r.after(5 * time.Second)
					must(t, r.fake.RestoreNoflush(f, section(rules.Nat,
						":KUBE-SERVICES - [0:0]", "-A OUTPUT -j KUBE-SERVICES", "-A KUBE-SERVICES -p tcp -j RETURN")))
					must(t, r.fake.RestoreNoflush(f, section(rules.Mangle, ":KUBE-IPTABLES-HINT - [0:0]"))) // kubelet's: no rule
					r.after(40 * time.Second)
					r.wantReady()
					if got := r.marked(f); !slices.Contains(got, rules.Nat) || !slices.Contains(got, rules.Mangle) {
						t.Errorf("%s deaf=%t: canaries stand in %v", f, deaf, got)
					}
					if records := r.records(0); len(records) != 0 {
						t.Errorf("a flush that never was: %+v", records)
					}
					before := r.tables()
					must(t, r.fake.Flush(f, rules.Nat, ""))
					r.after(40 * time.Second)
					if n := len(r.records(0)); n != 1 {
						t.Errorf("%s deaf=%t: %d flush records, want 1", f, deaf, n)
					}
					if mode == api.Heal {
						r.wantBack(before, r.tables())
					}
				})
			}
		}
	}
}

// TestDeclaredMakesTables: canaryd writes and guards a declaration for a table that does not
// exist.
func TestDeclaredMakesTables(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := onlyFilter(t, backend)
		must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
		own := rules.Generation{rules.IPv4.Table(rules.Nat): {Chains: []rules.Chain{{Name: "KUBE-MARK-MASQ", Rules: []rules.Rule{{Spec: "-j RETURN", Target: "RETURN"}}}}}}
		r := run(t, fake, setup{declared: rules.Generation{}})
		r.after(5 * time.Second)
		for range 2 {
			r.declare <- Declaration{Generation: own, Claims: claims}
			r.after(5 * time.Second)
			r.wantBare() // KUBE-MARK-MASQ alone is kubelet's
			if got := r.chain(rules.IPv4, rules.Nat, "KUBE-MARK-MASQ"); len(got) != 1 {
				t.Errorf("the declared chain holds %q", got)
			}
			must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
			r.after(5 * time.Second)
		}
		if f := r.records(0); len(f) != 2 || f[0].Outcome != reload.Proved {
			t.Errorf("the records are %+v", f)
		}
	})
}

// TestATableThatComesUpIsNoReasonToBeUnready: another program makes a table without rules to
// guard, and keeps the lock, so that the marks must wait. No guarded rule can be lost there, so
// the node is ready.
func TestATableThatComesUpIsNoReasonToBeUnready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := onlyFilter(t, iptables.Legacy)
		r := run(t, fake, setup{})
		r.after(5 * time.Second)
		for _, table := range []rules.TableName{rules.Mangle, rules.Nat} {
			must(t, fake.RestoreNoflush(rules.IPv4, section(table, ":corp - [0:0]", "-A OUTPUT -j corp", "-A corp -j RETURN")))
			release := fake.HoldLock()
			for range 100 {
				r.after(10 * time.Millisecond)
				if err := r.d.Status().Ready(); err != nil {
					t.Fatalf("%s: not ready: %v", table, err)
				}
			}
			release()
			r.after(time.Second)
			if !slices.Contains(r.marked(rules.IPv4), table) {
				t.Errorf("%s has no canary", table)
			}
		}
		// A table with protected rules is not guarded for certain before its marks are in
		// force.
		must(t, fake.RestoreNoflush(rules.IPv6, section(rules.Filter, ":KUBE-FIREWALL - [0:0]", "-A INPUT -j KUBE-FIREWALL")))
		release := fake.HoldLock()
		r.after(time.Second)
		if r.d.Status().Ready() == nil {
			t.Error("ready while a protected table has no canary")
		}
		release()
		r.after(time.Second)
		if err := r.d.Status().Ready(); err != nil {
			t.Errorf("not ready once the marks stand: %v", err)
		}
	})
}
