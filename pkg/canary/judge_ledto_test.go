package canary

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAChainOfOthersIsLostWithARuleThatLeadsThere: while the marks are present, its owner may
// empty and delete it freely. But a replay of a rule that leads there must put the chain back,
// too.
func TestAChainOfOthersIsLostWithARuleThatLeadsThere(t *testing.T) {
	const user, witness = "*filter\n:FORWARD DROP [0:0]\n:DOCKER-USER - [0:0]\n:DOCKER-FORWARD - [0:0]\n:DOCKER-BRIDGE - [0:0]\n:deny - [0:0]\n:log - [0:0]\n:one - [0:0]\n:two - [0:0]\n",
		"-A FORWARD -m comment --comment \"canaryd-witness:0123456789abcdef\"\n"
	const text = user + `:KUBE-CANARYD-CANARY - [0:0]
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
` + witness + `-A DOCKER-USER -j deny
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -j ACCEPT
-A DOCKER-BRIDGE -j one
-A deny -j log
-A deny -j DROP
-A log -j RETURN
-A one -j two
-A two -j DROP
COMMIT
`
	selector, err := protect.NewSelector([]string{"docker"})
	if err != nil {
		t.Fatal(err)
	}
	protection := selector.Protection()
	mark := Mark{Nonce: "0123456789abcdef", Witnessed: []string{"FORWARD"}}
	want := Wanted{CanaryChain: DefaultChain, Mark: mark, Section: protection.Extract(tableOf(t, text), IsMark)}
	if d := cmp.Diff([]string{"deny", "log", "one", "two"}, want.Section.LedTo); d != "" {
		t.Fatalf("(-want +got):\n%s", d)
	}
	for _, test := range []struct {
		name             string
		gone             []string // beginnings of lines
		verdict          Verdict
		emptied, missing []string
	}{
		{"one is empty", []string{"-A deny "}, Changed, nil, nil},
		{"one is deleted", []string{"-A deny ", "-A DOCKER-USER ", ":deny "}, Changed, nil, nil},
		{"and a jump that leads there is lost", []string{"-A deny ", "-A FORWARD "}, JumpsMissing, []string{"deny"}, nil},
		{"and one further down", []string{"-A two ", "-A FORWARD "}, JumpsMissing, []string{"two"}, nil},
		{"and one that only an empty chain led to", []string{"-A one ", ":two ", "-A two ", "-A FORWARD "}, JumpsMissing, []string{"one"}, []string{"two"}},
		{"and the jump goes to a chain that stays empty", []string{"-A DOCKER-USER ", "-A deny ", "-A FORWARD "}, JumpsMissing, nil, nil},
		{"its protected chain is lost", []string{"-A one ", "-A DOCKER-FORWARD "}, Emptied, []string{"DOCKER-FORWARD", "one"}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var left strings.Builder
			for line := range strings.Lines(text) {
				if !slices.ContainsFunc(test.gone, func(start string) bool { return strings.HasPrefix(line, start) }) {
					left.WriteString(line)
				}
			}
			table := tableOf(t, left.String())
			f := Judge(want, Seen{Table: table, Section: protection.Extract(table, IsMark), Quiet: true})
			if f.Verdict != test.verdict {
				t.Errorf("it is %s, want %s", f.Verdict, test.verdict)
			}
			if d := cmp.Diff(test.emptied, f.Emptied); d != "" {
				t.Errorf("emptied (-want +got):\n%s", d)
			}
			if d := cmp.Diff(test.missing, f.Missing); d != "" {
				t.Errorf("missing (-want +got):\n%s", d)
			}
		})
	}
}

// TestNoOwnerRemovesMostProtectedChains: chains of others must not change the share of removed
// protected chains.
func TestNoOwnerRemovesMostProtectedChains(t *testing.T) {
	section := rules.Section{
		Chains: []rules.Chain{{Name: "KUBE-A"}, {Name: "KUBE-B"}, {Name: "KUBE-C"}, {Name: "deny"}, {Name: "log"}},
		LedTo:  []string{"deny", "log"},
	}
	for _, test := range []struct{ missing, lost, released []string }{
		{[]string{"KUBE-A"}, nil, []string{"KUBE-A"}},
		{[]string{"KUBE-A", "deny"}, []string{"deny"}, []string{"KUBE-A"}},
		{[]string{"KUBE-A", "KUBE-B"}, []string{"KUBE-A", "KUBE-B"}, nil},
	} {
		f := Finding{Verdict: Emptied, Missing: test.missing}
		f.split(section)
		if d := cmp.Diff([][]string{test.lost, test.released}, [][]string{f.Missing, f.Released}); d != "" {
			t.Errorf("%v: lost and released (-want +got):\n%s", test.missing, d)
		}
	}
}
