package iptables

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nodeJumps is nat as owners write it, with jumps that the lexicon learns.
const nodeJumps = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 10.66.0.0/24 ! -o docker0 -j MASQUERADE
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j RETURN
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
COMMIT
`

// TestAChainOfAnotherPriority: an nftables.conf declares iptables' chains with
// priorities of its own. canaryd reads the rules that it writes there, so it does
// not write them again.
func TestAChainOfAnotherPriority(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		_, _ = tryTool(t, nodeJumps, "iptables-nft-restore")
		k := openKernel(t, Config{Backend: NFT})
		whole := mustRead(t, k, rules.IPv4).Tables[rules.Nat]
		nstest.Command(t, "nft", `flush ruleset
			table ip nat {
				chain PREROUTING { type nat hook prerouting priority 0; }
				chain POSTROUTING { type nat hook postrouting priority 0; }
				chain OUTPUT { type nat hook output priority -10; }
			}`)
		s := begin(t, k)
		if seen := mustRead(t, s, rules.IPv4); len(seen.Misfits) > 0 {
			t.Fatalf("misfits %v", seen.Misfits)
		}
		w := s.Restore(t.Context(), Payload{rules.IPv4: scriptsOf(t, nodeJumps)})[rules.IPv4]
		if w.Err != nil || !slices.Equal(w.Direct, []rules.TableName{rules.Nat}) {
			t.Fatalf("written %+v", w)
		}
		got := mustRead(t, s, rules.IPv4).Tables[rules.Nat]
		if diff := cmp.Diff(whole.Chains, got.Chains, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("what was written is read otherwise (-want +got):\n%s", diff)
		}

		// A Kernel that never met these rules elsewhere decodes them, because
		// iptables prints nothing of such a chain.
		fresh := mustRead(t, openKernel(t, Config{Backend: NFT}), rules.IPv4).Tables[rules.Nat]
		if diff := cmp.Diff(whole.Chains, fresh.Chains, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("what another Kernel reads (-want +got):\n%s", diff)
		}

		// Text is never written there, because it could not be read back and
		// proved.
		s2 := begin(t, openKernel(t, Config{Backend: NFT, Replay: ReplayText}))
		mustRead(t, s2, rules.IPv4)
		before := nstest.Command(t, "nft", "-s", "list", "ruleset")
		w = s2.Restore(t.Context(), Payload{rules.IPv4: scriptsOf(t, nodeJumps)})[rules.IPv4]
		var refused *RestoreError
		if !errors.As(w.Err, &refused) || refused.Reason != ReasonIncompatible || !strings.Contains(w.Err.Error(), "priority 0") {
			t.Errorf("error %v", w.Err)
		}
		if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
			t.Errorf("a refused text was written (-before +after):\n%s", diff)
		}
	})
}

// TestAChainInWhichNoJumpWorks: packets meet a chain elsewhere than iptables'
// own. No path writes into it, and the read gives the reason.
func TestAChainInWhichNoJumpWorks(t *testing.T) {
	tests := []struct {
		name, table string
		misfits     []string
		says        string
	}{
		{"another hook", "chain PREROUTING { type nat hook postrouting priority -100; }", []string{"PREROUTING"}, "hook postrouting"},
		{"another type", "chain PREROUTING { type filter hook prerouting priority -100; }", []string{"PREROUTING"}, "type filter"},
		{"no hook", "chain PREROUTING {\n}", []string{"PREROUTING"}, "has no hook"},
		{"no hook, and a rule", "chain X {\n}\nchain PREROUTING {\ncounter jump X\n}", []string{"PREROUTING"}, "has no hook"},
		{"dormant", "flags dormant\nchain PREROUTING { type nat hook prerouting priority -100; }", []string{"INPUT", "OUTPUT", "POSTROUTING", "PREROUTING"}, "is dormant"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft", "nft")
				_, _ = tryTool(t, nodeJumps, "iptables-nft-restore")
				k := openKernel(t, Config{Backend: NFT})
				mustRead(t, k, rules.IPv4)
				nstest.Command(t, "nft", "flush ruleset\ntable ip nat {\n"+test.table+"\n}")
				before := nstest.Command(t, "nft", "-s", "list", "ruleset")
				for _, replay := range []Replay{ReplayAuto, ReplayText} {
					with := k
					if replay != ReplayAuto {
						with = openKernel(t, Config{Backend: NFT, Replay: replay})
					}
					s := begin(t, with)
					seen := mustRead(t, s, rules.IPv4)
					var names []string
					for p, why := range seen.Misfits {
						names = append(names, p.Chain)
						if p.Table != rules.Nat || !strings.Contains(why.Error(), test.says) {
							t.Errorf("%v: %v", p, why)
						}
					}
					slices.Sort(names)
					if diff := cmp.Diff(test.misfits, names); diff != "" {
						t.Errorf("misfits (-want +got):\n%s", diff)
					}
					if n := len(seen.Tables[rules.Nat].Rules("PREROUTING")); n > 0 {
						t.Errorf("%d rules count as PREROUTING's", n)
					}
					if test.name == "dormant" {
						continue // writers trust the read
					}
					for _, write := range []func() Written{
						func() Written {
							return s.Restore(t.Context(), Payload{rules.IPv4: scriptsOf(t, nodeJumps)})[rules.IPv4]
						},
						func() Written {
							return s.RestoreAnyway(t.Context(), Payload{rules.IPv4: scriptsOf(t, nodeJumps)})[rules.IPv4]
						},
					} {
						mustRead(t, s, rules.IPv4)
						var refused *RestoreError
						if w := write(); !errors.As(w.Err, &refused) || refused.Reason != ReasonIncompatible || !strings.Contains(w.Err.Error(), test.says) {
							t.Errorf("%s: error %v", replay, w.Err)
						}
					}
					if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
						t.Fatalf("%s wrote into it (-before +after):\n%s", replay, diff)
					}
				}
			})
		})
	}
}

// TestADormantTableWakes: its rules are in force again.
func TestADormantTableWakes(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		_, _ = tryTool(t, nodeJumps, "iptables-nft-restore")
		k := openKernel(t, Config{Backend: NFT})
		whole := mustRead(t, k, rules.IPv4).Tables[rules.Nat]
		nstest.Command(t, "nft", "add table ip nat { flags dormant; }")
		asleep := mustRead(t, k, rules.IPv4)
		if n := len(asleep.Tables[rules.Nat].Rules("POSTROUTING")); n > 0 || len(asleep.Misfits) != 4 {
			t.Errorf("asleep: %d rules in POSTROUTING, misfits %v", n, slices.Collect(maps.Keys(asleep.Misfits)))
		}
		nstest.Command(t, "nft", "add table ip nat")
		awake := mustRead(t, k, rules.IPv4)
		if diff := cmp.Diff(whole.Chains, awake.Tables[rules.Nat].Chains, cmpopts.EquateEmpty()); diff != "" || len(awake.Misfits) > 0 {
			t.Errorf("awake: misfits %v (-want +got):\n%s", awake.Misfits, diff)
		}
	})
}
