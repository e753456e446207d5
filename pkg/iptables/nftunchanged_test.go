package iptables

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// probeMarks are planted before each case: a canary, and a witness after two
// other rules.
const probeMarks = `*filter
:CANARY - [0:0]
-A CANARY -m comment --comment canaryd-canary:1
-A INPUT -s 10.0.0.1 -j ACCEPT
-A INPUT -s 10.0.0.2 -j ACCEPT
-A INPUT -m comment --comment canaryd-witness:1
COMMIT
`

// TestProbeUnchanged: another process may do anything between two probes. The
// second probe must return the same as a probe without memory. If the marks and
// the number of rules are unchanged, it reads nothing again.
func TestProbeUnchanged(t *testing.T) {
	for name, tc := range map[string]struct {
		lines []string // arguments of iptables
		input string   // of iptables-restore --noflush
		again bool     // the memory suffices
	}{
		"nothing":                    {again: true},
		"another chain":              {lines: []string{"-N OTHER", "-A OTHER -j DROP"}, again: true},
		"another table":              {lines: []string{"-t nat -N OTHER"}, again: true},
		"a rule beside the witness":  {lines: []string{"-R INPUT 1 -s 10.0.0.3 -j DROP"}, again: true},
		"a rule more":                {lines: []string{"-I INPUT -s 10.0.0.3 -j DROP"}},
		"a jump to the canary":       {lines: []string{"-A FORWARD -j CANARY"}},
		"canary flushed":             {lines: []string{"-F CANARY"}},
		"canary deleted":             {lines: []string{"-F CANARY", "-X CANARY"}},
		"canary of another nonce":    {lines: []string{"-R CANARY 1 -m comment --comment canaryd-canary:2"}},
		"canary written anew":        {input: "*filter\n:CANARY - [0:0]\n-A CANARY -m comment --comment canaryd-canary:1\nCOMMIT\n"},
		"canary with a target":       {lines: []string{"-R CANARY 1 -m comment --comment canaryd-canary:1 -j DROP"}},
		"a second rule":              {lines: []string{"-A CANARY -m comment --comment canaryd-canary:1"}},
		"a chain flushed":            {lines: []string{"-F INPUT"}},
		"the witness deleted":        {lines: []string{"-D INPUT 3"}},
		"the witness changed places": {lines: []string{"-D INPUT 3", "-I INPUT -m comment --comment canaryd-witness:1"}},
		"all flushed":                {lines: []string{"-F", "-X"}},
		"all flushed and restored":   {lines: []string{"-F", "-X"}, input: probeMarks},
	} {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft")
				family := rules.IPv4
				nstest.CommandInput(t, probeMarks, "iptables-nft-restore", "--noflush")
				k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
				r, ok := k.reader.(nftReader)
				if !ok {
					t.Fatalf("the reader is a %T", k.reader)
				}
				places := []Place{{Table: rules.Filter, Chain: "CANARY"}, {Table: rules.Filter, Chain: "INPUT"}}
				if _, err := r.probeUnchanged(family, places); !errors.Is(err, errOther) {
					t.Errorf("probeUnchanged without a probe before: %v", err)
				}
				mustProbe(t, k, family, places...)
				sendTraffic(t, family) // counters do not count as content
				for _, line := range tc.lines {
					iptablesCommand(t, NFT, family, line)
				}
				if tc.input != "" {
					nstest.CommandInput(t, tc.input, "iptables-nft-restore", "--noflush")
				}
				unchanged, err := r.probeUnchanged(family, places)
				if (err == nil) != tc.again {
					t.Errorf("probeUnchanged returned %v, want success: %v", err, tc.again)
				}
				got := mustProbe(t, k, family, places...)
				r.memory = newNFTMemory()
				want, err := r.probe(t.Context(), family, places)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("the second probe (-want +got):\n%s", diff)
				}
				if tc.again {
					if diff := cmp.Diff(want, unchanged); diff != "" {
						t.Errorf("probeUnchanged (-want +got):\n%s", diff)
					}
				}
			})
		})
	}
}

// TestProbeUnchangedOfTooMuch: if the places do not fit into one datagram, all
// are read.
func TestProbeUnchangedOfTooMuch(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		var text strings.Builder
		var places []Place
		text.WriteString("*filter\n")
		for i := range 50 { // a datagram takes 40

			place := Place{Table: rules.Filter, Chain: "C" + string(rune('A'+i%26)) + string(rune('A'+i/26))}
			places = append(places, place)
			text.WriteString(":" + place.Chain + " -\n-A " + place.Chain + " -m comment --comment " + place.Chain + "\n")
		}
		nstest.CommandInput(t, text.String()+"COMMIT\n", "iptables-nft-restore")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{rules.IPv4}})
		for range 2 {
			probed := mustProbe(t, k, rules.IPv4, places...)
			for _, place := range places {
				if diff := cmp.Diff(Holding{Present, 1, []string{place.Chain}}, probed.Holdings[place]); diff != "" {
					t.Errorf("%v (-want +got):\n%s", place, diff)
				}
			}
		}
	})
}
