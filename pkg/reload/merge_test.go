package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAPodThatCameDuringTheOutageKeepsNobodyOut: between flush and replay one of many owners writes
// its rules to their shared chain. The replay adds the others' rules next to them, in their old
// order, but no rules of an owner that has left. It keeps every present rule, even one written at
// the last moment.
func TestAPodThatCameDuringTheOutageKeepsNobodyOut(t *testing.T) {
	for _, test := range []struct {
		name    string
		before  string // the rules of SHARED; each -j CNI-DN-N has its chain
		flush   []string
		during  string // the lines that its owners write meanwhile
		want    string
		private bool // the chain is not known to be shared
	}{
		{name: "appended", before: "-j CNI-DN-1\n-j CNI-DN-2", during: "-A SHARED -j ACCEPT", want: "-j CNI-DN-1\n-j CNI-DN-2\n-j ACCEPT"},
		{name: "one of them removed", before: "-j CNI-DN-1\n-j CNI-DN-2", during: "-X CNI-DN-1\n-A SHARED -j ACCEPT", want: "-j CNI-DN-2\n-j ACCEPT"},
		{name: "one of them written again", before: "-j CNI-DN-1\n-j CNI-DN-2\n-s 10.0.0.1/32 -j ACCEPT", during: "-A SHARED -j CNI-DN-2", want: "-j CNI-DN-1\n-j CNI-DN-2\n-s 10.0.0.1/32 -j ACCEPT"},
		{name: "chains deleted as well", before: "-j CNI-DN-1\n-j CNI-DN-2", flush: []string{"-F", "-X"}, during: ":SHARED - [0:0]\n-A SHARED -j ACCEPT", want: "-j CNI-DN-1\n-j CNI-DN-2\n-j ACCEPT"},
		{name: "the last word stays last", before: "-j CNI-DN-1\n-j RETURN", during: "-A SHARED -s 10.0.0.9/32 -j ACCEPT", want: "-j CNI-DN-1\n-s 10.0.0.9/32 -j ACCEPT\n-j RETURN"},
		{name: "between what was written again", before: "-j CNI-DN-1\n-s 10.0.0.1/32 -j ACCEPT\n-j RETURN", during: "-A SHARED -j CNI-DN-1\n-A SHARED -s 10.0.0.9/32 -j ACCEPT\n-A SHARED -j RETURN", want: "-j CNI-DN-1\n-s 10.0.0.1/32 -j ACCEPT\n-s 10.0.0.9/32 -j ACCEPT\n-j RETURN"},
		{name: "all of it written again", before: "-j CNI-DN-1\n-j CNI-DN-2", during: "-A SHARED -j CNI-DN-2\n-A SHARED -j CNI-DN-1", want: "-j CNI-DN-2\n-j CNI-DN-1"},
		{name: "not known to be shared", before: "-j CNI-DN-1\n-j CNI-DN-2", during: "-A SHARED -j ACCEPT", want: "-j ACCEPT", private: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				n.replayer.Protection.Chain = func(chain string) bool {
					return protects(chain) || strings.HasPrefix(chain, "CNI-") || chain == "SHARED"
				}
				n.replayer.Protection.Piecewise = func(chain string) bool { return chain == "SHARED" && !test.private }
				lines := []string{"*nat", ":SHARED - [0:0]", ":CNI-DN-1 - [0:0]", ":CNI-DN-2 - [0:0]", "-A PREROUTING -j SHARED", "-A CNI-DN-1 -j RETURN", "-A CNI-DN-2 -j RETURN"}
				for spec := range strings.Lines(test.before + "\n") {
					lines = append(lines, "-A SHARED "+strings.TrimSpace(spec))
				}
				must(t, n.RestoreNoflush(v4, strings.Join(append(lines, "COMMIT\n"), "\n")))
				n.learn()
				if test.flush == nil {
					test.flush = []string{"-F"}
				}
				must(t, n.RestoreNoflush(v4, "*nat\n"+strings.Join(test.flush, "\n")+"\nCOMMIT\n"))
				must(t, n.RestoreNoflush(v4, "*nat\n"+test.during+"\nCOMMIT\n"))
				n.outcome(n.heal(), v4, Proved)
				if d := cmp.Diff(ruleList(strings.Split(test.want, "\n")...), n.natChain("SHARED")); d != "" {
					t.Errorf("SHARED (-want +got):\n%s", d)
				}
				n.outcome(n.heal(), v4, Skipped)
			})
		})
	}
}

// TestARuleWrittenAtTheLastMomentIsNotThePriceOfAMerge: no guard stops a write between the
// restore's last check and its commit (nft, as text). That rule must stay.
func TestARuleWrittenAtTheLastMomentIsNotThePriceOfAMerge(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	n.replayer.Protection.Chain = func(chain string) bool { return protects(chain) || chain == "SHARED" }
	n.replayer.Protection.Piecewise = func(chain string) bool { return chain == "SHARED" }
	must(t, n.RestoreNoflush(v4, "*nat\n:SHARED - [0:0]\n-A PREROUTING -j SHARED\n-A SHARED -s 10.0.0.1/32 -j ACCEPT\nCOMMIT\n"))
	n.learn()
	must(t, n.Flush(v4, rules.Nat, ""))
	must(t, n.RestoreNoflush(v4, "*nat\n-A SHARED -s 10.0.0.2/32 -j ACCEPT\nCOMMIT\n"))
	n.BeforeRestore(func() {
		n.BeforeRestore(nil)
		must(t, n.RestoreNoflush(v4, "*nat\n-A SHARED -s 10.0.0.3/32 -j ACCEPT\nCOMMIT\n"))
	})
	n.outcome(n.heal(), v4, Raced)
	want := ruleList("-s 10.0.0.1/32 -j ACCEPT", "-s 10.0.0.2/32 -j ACCEPT", "-s 10.0.0.3/32 -j ACCEPT")
	if d := cmp.Diff(want, n.natChain("SHARED")); d != "" {
		t.Errorf("SHARED (-want +got):\n%s", d)
	}
}

func TestLastResorts(t *testing.T) {
	for list, want := range map[string]int{
		"-j ACCEPT":                   1,
		"-j ACCEPT\n-i br1 -j DROP":   1,
		"-i br1 -j DROP\n-j ACCEPT":   2,
		"-i br1 -j DROP\n-j RETURN":   0,
		"-i br1 -j RETURN":            1, // Docker's first rule in nat
		"-j ACCEPT\n-o br0 -j REJECT": 1,
	} {
		if got := lastResorts(ruleList(strings.Split(list, "\n")...)); got != want {
			t.Errorf("%q: %d, want %d", list, got, want)
		}
	}
}

func (n *testNode) natChain(name string) []rules.Rule {
	n.t.Helper()
	after, err := n.Fake.Read(n.t.Context(), v4)
	must(n.t, err)
	c := after.Tables[rules.Nat].Chain(name)
	if c == nil {
		n.t.Fatalf("%s is missing", name)
	}
	return c.Rules
}
