package iptables_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The kernel refuses a rule in its place. All other rules are written: also a
// rule of the same table that has only bytes, and the same rule in another chain.
func TestARuleThatIsRefusedInItsPlaceCostsNoOther(t *testing.T) {
	const refused = "-m owner --uid-owner 0"
	for _, test := range []struct {
		name    string
		learned []string
		odd     bool // P-MINE has a rule without a text
		want    map[string][]string
	}{
		{
			name: "a rule without a text stands before it", odd: true, learned: []string{"-A P-MINE " + refused, "-A P-MINE -p udp", "-A OUTPUT -j P-MINE"},
			want: map[string][]string{"P-MINE": {"-j LOG", "-p udp"}},
		},
		{
			name: "another chain has the same rule", learned: []string{"-A P-MINE " + refused, "-A P-MINE -p udp", "-A P-OTHER -p tcp", "-A P-OTHER " + refused, "-A OUTPUT -j P-MINE", "-A OUTPUT -j P-OTHER"},
			want: map[string][]string{"P-MINE": {"-p udp"}, "P-OTHER": {"-p tcp", refused}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft")
				run := func(lines ...string) {
					for _, line := range lines {
						nstest.Command(t, "iptables-nft", strings.Fields(line)...)
					}
				}
				run("-N P-MINE", "-N P-OTHER")
				if test.odd {
					nstest.Command(t, "iptables-nft", "-A", "P-MINE", "-m", "comment", "--comment", "line\nbreak", "-j", "LOG")
				}
				run(test.learned...)
				n := &refusingNode{counter: &counter{Kernel: iptables.OpenKernel(t, iptables.Config{Backend: iptables.NFT})}}
				n.learn(t)
				for range 2 { // the second time, the rule is quarantined
					run("-F", "-X", "-N P-MINE", "-A INPUT -j P-MINE")
					result, err := n.replayer.Heal(t.Context(), n.job)
					if err != nil {
						t.Fatal(err)
					}
					filter := result[rules.IPv4].Tables[rules.Filter]
					if !filter.Proved {
						t.Errorf("it is not proved: %v", result[rules.IPv4].Err)
					}
					if h := filter.Quarantined; len(h) != 1 || h[0].Chain != "P-MINE" || h[0].Rule.Label() != refused || !h[0].Refused {
						t.Errorf("in quarantine: %+v", h)
					}
					for chain, want := range test.want {
						var got []string
						for _, r := range n.read(t, rules.IPv4).Rules(chain) {
							label := r.Label()
							if _, opaque := r.Opaque(); opaque {
								label = "-j " + r.Target
							}
							got = append(got, label)
						}
						if diff := cmp.Diff(want, got); diff != "" {
							t.Errorf("%s (-want +got):\n%s", chain, diff)
						}
					}
					n.job.Quarantine = n.job.Quarantine.With(rules.IPv4.Table(rules.Filter), filter.Quarantined)
					n.job.Marks = n.job.Marks.With(rules.IPv4.Table(rules.Filter), filter.Mark)
				}
			})
		})
	}
}
