package iptables

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// earlierRules have matches that pkg/ruleset spells, that only iptables prints, and an ipset, whose
// number is another one after the flush.
const earlierRules = `*filter
:KUBE-A - [0:0]
-A KUBE-A -s 10.0.0.0/8 -m comment --comment "it's a \"comment\"" -j ACCEPT
-A KUBE-A -p tcp -m tcp --dport 80 -m statistic --mode random --probability 0.33332999982 -j RETURN
-A KUBE-A -m string --string "canary" --algo bm -j DROP
-A KUBE-A -m length --length 64:128 -j ACCEPT
-A KUBE-A -m set --match-set addresses src -j ACCEPT
-A FORWARD -j KUBE-A
COMMIT
`

// TestRulesOfBeforeAreWrittenByTheirBytes: a Kernel that never met a rule writes it by the bytes
// that an earlier one kept, and reads it back by the same text.
func TestRulesOfBeforeAreWrittenByTheirBytes(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		nstest.NeedProgram(t, "ipset")
		createSet(t, rules.IPv4, "addresses")
		nstest.CommandInput(t, earlierRules, "iptables-nft-restore")
		before := openKernel(t, Config{Backend: NFT})
		var kept []RawRule
		texts, payload := map[string]bool{}, "*filter\n:KUBE-A - [0:0]\n"
		for _, chain := range mustRead(t, before, rules.IPv4).Tables[rules.Filter].Chains {
			for _, r := range chain.Rules {
				payload += "-A " + chain.Name + " " + r.Spec + "\n"
				raw, ok := before.RawRule(rules.IPv4, r, nil)
				if !ok {
					t.Errorf("no bytes of %s", r.Label())
				}
				kept, texts[raw.Text] = append(kept, raw), true
			}
		}
		payload += "COMMIT\n"
		// pkg/ruleset spells the others. iptables 1.8.7 prints where the search ends, too.
		want := map[string]bool{"": true, `-m string --string "canary" --algo bm -j DROP`: true, "-m length --length 64:128 -j ACCEPT": true}
		for text := range maps.Keys(texts) {
			if !want[strings.Replace(text, " --to 65535", "", 1)] {
				t.Errorf("the text is kept: %s", text)
			}
		}
		for _, tt := range []struct {
			name   string
			kept   []RawRule
			direct []rules.TableName
		}{
			{"as they were", kept, []rules.TableName{rules.Filter}},
			{"nothing is kept", nil, nil},
			{"bytes of other rules under their texts", swapped(kept), nil},
			{"no rules", []RawRule{{Text: "-j ACCEPT", Bytes: []byte("hello")}, {Bytes: []byte{255}}, {}}, nil},
		} {
			t.Run(tt.name, func(t *testing.T) {
				iptablesCommand(t, NFT, rules.IPv4, "-F")
				iptablesCommand(t, NFT, rules.IPv4, "-X")
				nstest.Command(t, "ipset", "destroy")
				createSet(t, rules.IPv4, "another")
				createSet(t, rules.IPv4, "addresses")
				k := openKernel(t, Config{Backend: NFT})
				k.KnowEarlier(func(f rules.Family, add func(RawRule)) {
					if f == rules.IPv4 {
						for _, raw := range tt.kept {
							add(RawRule{raw.Text, slices.Clone(raw.Bytes)})
						}
					}
				})
				s := begin(t, k)
				mustRead(t, s, rules.IPv4)
				written := s.Restore(t.Context(), Payload{rules.IPv4: mustParseScripts(t, payload)})[rules.IPv4]
				if written.Err != nil {
					t.Fatal(written.Err)
				}
				if diff := cmp.Diff(tt.direct, written.Direct); diff != "" {
					t.Errorf("written by bytes (-want +got):\n%s%v", diff, written.Detour)
				}
				wantAsSaved(t, k, rules.IPv4, tt.name)
			})
		}
	})
}

// swapped returns the rules with their texts exchanged.
func swapped(kept []RawRule) []RawRule {
	list := slices.Clone(kept)
	var with []int
	for i := range list {
		if list[i].Text != "" {
			with = append(with, i)
		}
	}
	for i, at := range with {
		list[at].Text = kept[with[len(with)-1-i]].Text
	}
	return list
}
