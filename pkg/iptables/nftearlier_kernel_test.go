package iptables

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// earlierRules have matches that pkg/ruleset spells, and an ipset, whose number
// changes after the flush. pkg/ruleset does not spell the last rule of KUBE-A.
const earlierRules = `*filter
:KUBE-A - [0:0]
-A KUBE-A -s 10.0.0.0/8 -m comment --comment "it's a \"comment\"" -j ACCEPT
-A KUBE-A -p tcp -m tcp --dport 80 -m statistic --mode random --probability 0.33332999982 -j RETURN
-A KUBE-A -m string --string "canary" --algo bm -j DROP
-A KUBE-A -m length --length 64:128 -j ACCEPT
-A KUBE-A -m set --match-set addresses src -j ACCEPT
-A KUBE-A -m connbytes --connbytes 1000:2000 --connbytes-mode bytes --connbytes-dir both -j ACCEPT
-A FORWARD -j KUBE-A
COMMIT
`

// TestRulesOfBeforeAreWrittenByTheirBytes: a Kernel that never met a rule writes
// it by an earlier Kernel's bytes, or by the rule's own, and reads the same rule.
// Without them iptables-restore translates a text to bytes.
func TestRulesOfBeforeAreWrittenByTheirBytes(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		nstest.NeedProgram(t, "ipset")
		createSet(t, rules.IPv4, "addresses")
		nstest.CommandInput(t, earlierRules, "iptables-nft-restore")
		before := openKernel(t, Config{Backend: NFT})
		var kept []RawRule
		want := mustRead(t, before, rules.IPv4).Tables[rules.Filter]
		script, opaque := replayOf(rules.Filter, "KUBE-A", want.Rules("KUBE-A")), 0
		script.Steps = append(script.Steps, Step{Verb: Append, Chain: "FORWARD", Rule: want.Rules("FORWARD")[0]})
		for _, step := range script.Steps {
			raw, ok := before.RawRule(rules.IPv4, step.Rule, nil)
			if _, is := step.Rule.Opaque(); is {
				opaque++
			} else if !ok {
				t.Errorf("no bytes of %s", step.Rule.Label())
			}
			if ok {
				kept = append(kept, raw)
			}
		}
		if opaque != 1 || len(kept) != 6 {
			t.Errorf("%d rules are opaque, and %d have bytes elsewhere", opaque, len(kept))
		}
		for _, tt := range []struct {
			name     string
			kept     []RawRule
			programs int
		}{
			{"as they were", kept, 0},
			{"nothing is kept", nil, 1},
			{"no rules", []RawRule{{Text: "-j ACCEPT", Bytes: []byte("hello")}, {Bytes: []byte{255}}, {}}, 1},
		} {
			t.Run(tt.name, func(t *testing.T) {
				iptablesCommand(t, NFT, rules.IPv4, "-F")
				iptablesCommand(t, NFT, rules.IPv4, "-X")
				nstest.Command(t, "ipset", "destroy")
				createSet(t, rules.IPv4, "another")
				createSet(t, rules.IPv4, "addresses")
				k := openKernel(t, Config{Backend: NFT})
				k.KnowEarlier(earlierOf(rules.IPv4, tt.kept))
				calls := countPrograms(t, k, rules.IPv4)
				s := begin(t, k)
				mustRead(t, s, rules.IPv4)
				written := s.Restore(t.Context(), Payload{rules.IPv4: {script}})[rules.IPv4]
				if diff := cmp.Diff([]rules.TableName{rules.Filter}, written.Direct); written.Err != nil || written.Detour != nil || diff != "" {
					t.Errorf("%v, %v, written by bytes (-want +got):\n%s", written.Err, written.Detour, diff)
				}
				if n := calls(); n != tt.programs {
					t.Errorf("%d programs were executed, want %d", n, tt.programs)
				}
				got := mustRead(t, k, rules.IPv4).Tables[rules.Filter]
				if diff := cmp.Diff(want.Chains, got.Chains); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		}
	})
}

// earlierOf returns the kept rules of one family.
func earlierOf(family rules.Family, kept []RawRule) Earlier {
	return func(f rules.Family, add func(RawRule)) {
		for _, raw := range kept {
			if f == family {
				add(RawRule{raw.Text, slices.Clone(raw.Bytes)})
			}
		}
	}
}

// The first read shows a text that canaryd cannot spell, if an earlier Kernel
// kept its bytes. Other words would be another rule. A kept text does not count
// if its bytes have another target.
func TestTheFirstReadShowsTheTextOfBefore(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		written := rules.Rule{Spec: "-p tcp -m cpu --cpu 0 -j ACCEPT", Target: "ACCEPT"}
		before := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		restoreAll(t, before, family, replayOf(rules.Filter, "MINE", []rules.Rule{written}))
		mustRead(t, before, family)
		kept, ok := before.RawRule(family, written, nil)
		if !ok || kept.Text != written.Spec {
			t.Fatalf("kept is %+v, %t", kept, ok)
		}
		for name, c := range map[string]struct {
			text   string
			opaque bool
		}{"the text": {written.Spec, false}, "a text that drops": {"-p tcp -m cpu --cpu 0 -j DROP", true}, "no text": {"", true}} {
			k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
			k.KnowEarlier(earlierOf(family, []RawRule{{c.text, kept.Bytes}}))
			got := mustRead(t, k, family).Tables[rules.Filter].Rules("MINE")[0]
			if _, opaque := got.Opaque(); opaque != c.opaque || !opaque && got != written {
				t.Errorf("%s: %v", name, got)
			}
		}
	})
}
