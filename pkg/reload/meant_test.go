package reload

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// meantText has rules of every kind that a replay may not write as they were learned.
const meantText = `*filter
:FORWARD DROP [0:0]
:KUBE-A - [0:0]
:KUBE-B - [0:0]
:KUBE-C - [0:0]
:KUBE-D - [0:0]
-A FORWARD -p tcp -m nfacct --nfacct-name dropped -j KUBE-C
-A FORWARD -j KUBE-A
-A FORWARD -m set --match-set bad src -j KUBE-C
-A FORWARD -j KUBE-D
-A KUBE-A -p icmp -m nfacct --nfacct-name dropped -j DROP
-A KUBE-A -p tcp -j KUBE-B
-A KUBE-A -p udp -j KUBE-C
-A KUBE-A -m set --match-set bad src -j DROP
-A KUBE-A -j ACCEPT
-A KUBE-B -j ACCEPT
-A KUBE-C -j ACCEPT
-A KUBE-D -j ACCEPT
COMMIT
`

// TestWhatAReplayChangesEndsNoQuarantine: a replay leaves rules out of a chain or changes them,
// which is not the chain's owner's decision. The quarantined rules stay quarantined, and are put
// back in their place.
func TestWhatAReplayChangesEndsNoQuarantine(t *testing.T) {
	const counted, rest = "-p icmp -m nfacct --nfacct-name dropped -j DROP", "-m set --match-set bad src -j DROP"
	tests := []struct {
		name   string
		replay func(n *testNode) (Result, error)
		want   []string // the rules of KUBE-A in the end
	}{
		{"a rule is written without its nfacct match", func(n *testNode) (Result, error) {
			n.Sets().Destroy("dropped")
			n.Sets().Refuse("dropped", errors.New("no memory"))
			must(t, n.Flush(v4, rules.Filter, ""))
			return n.replayer.Heal(t.Context(), n.job)
		}, []string{"-p icmp -j DROP", "-p tcp -j KUBE-B", "-p udp -j KUBE-C", rest, "-j ACCEPT"}},
		{"the owner of a chain removes it after the flush", func(n *testNode) (Result, error) {
			must(t, n.Flush(v4, rules.Filter, ""))
			must(t, n.RestoreNoflush(v4, "*filter\n-X KUBE-B\nCOMMIT\n"))
			return n.replayer.Heal(t.Context(), n.job)
		}, []string{counted, "-p udp -j KUBE-C", rest, "-j ACCEPT"}},
		{"another generation than the last one is restored", func(n *testNode) (Result, error) {
			job := n.job
			must(t, n.RestoreNoflush(v4, "*filter\n:KUBE-A - [0:0]\n-A KUBE-A -p sctp -j ACCEPT\n-D FORWARD -j KUBE-D\n-F KUBE-D\n-X KUBE-D\nCOMMIT\n"))
			n.look()
			must(t, n.Flush(v4, rules.Filter, ""))
			return n.replayer.Force(t.Context(), job)
		}, []string{counted, "-p tcp -j KUBE-B", "-p udp -j KUBE-C", rest, "-j ACCEPT"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachNodeOf(t, meantText, func(t *testing.T, n *testNode) {
				n.loseBad()
				result, err := test.replay(n)
				must(t, err)
				n.take(result)
				n.takeHeld(result)
				held := n.held()
				if len(held) != 4 {
					t.Fatalf("in quarantine: %q", held)
				}
				for range 3 {
					n.look()
					if d := cmp.Diff(held, n.held()); d != "" {
						t.Fatalf("in quarantine (-want +got):\n%s", d)
					}
				}
				n.Sets().Put(setBad)
				readmitted, err := n.replayer.Readmit(t.Context(), n.job)
				must(t, err)
				n.takeHeld(readmitted)
				n.look()
				a, _ := n.filter().Chain("KUBE-A")
				if d := cmp.Diff(ruleList(test.want...), a.Rules); d != "" || n.job.Quarantine.Count() != 0 {
					t.Errorf("in quarantine %q, and KUBE-A is (-want +got):\n%s", n.held(), d)
				}
				if got := len(n.filter().Jumps); got != 4 {
					t.Errorf("%d jumps stand, want 4", got)
				}
			})
		})
	}
}

// TestASecondWriteForgetsNoQuarantine: a replay writes a second time, because a text was misread.
// It still knows the rules that its first write left out of other chains.
func TestASecondWriteForgetsNoQuarantine(t *testing.T) {
	eachNodeOf(t, meantText, func(t *testing.T, n *testNode) {
		n.loseBad()
		n.Misread("-A KUBE-D -j ACCEPT", "-A KUBE-D -p tcp -j ACCEPT")
		must(t, n.Flush(v4, rules.Filter, ""))
		must(t, n.RestoreNoflush(v4, "*filter\n-X KUBE-B\nCOMMIT\n"))
		n.takeHeld(n.heal())
		want := []string{
			"-A FORWARD -j KUBE-D", "-A FORWARD -m set --match-set bad src -j KUBE-C",
			"-A KUBE-A -j ACCEPT", "-A KUBE-A -m set --match-set bad src -j DROP", "-A KUBE-D -j ACCEPT",
		}
		for range 2 {
			if d := cmp.Diff(want, n.held()); d != "" {
				t.Fatalf("in quarantine (-want +got):\n%s", d)
			}
			n.look()
		}
	})
}

// TestAJumpInOtherWordsEndsTheQuarantineOfTheOldOne: an owner writes a quarantined jump in other
// words. canaryd must not put the old jump back next to the new one.
func TestAJumpInOtherWordsEndsTheQuarantineOfTheOldOne(t *testing.T) {
	const newer = "-A FORWARD -m conntrack --ctstate NEW -j KUBE-D"
	upgrade := func(n *testNode) { must(t, n.RestoreNoflush(v4, "*filter\n"+newer+"\nCOMMIT\n")) }
	tests := []struct {
		name  string
		story func(n *testNode)
	}{
		{"and canaryd looks", func(n *testNode) {
			upgrade(n)
			n.look()
		}},
		{"right before the quarantined rules are tried again", upgrade},
		{"between another flush and its replay", func(n *testNode) {
			must(t, n.Flush(v4, rules.Filter, ""))
			upgrade(n)
			n.takeHeld(n.heal())
			n.look()
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachNodeOf(t, meantText, func(t *testing.T, n *testNode) {
				n.loseBad()
				must(t, n.Flush(v4, rules.Filter, ""))
				n.takeHeld(n.heal())
				if held := n.held(); !slices.Contains(held, "-A FORWARD -j KUBE-D") {
					t.Fatalf("in quarantine: %q", held)
				}
				test.story(n)
				n.Sets().Put(setBad)
				result, err := n.replayer.Readmit(t.Context(), n.job)
				must(t, err)
				n.takeHeld(result)
				n.look()
				var jumps []string
				for _, h := range n.job.Generation[v4.Table(rules.Filter)].Jumps {
					jumps = append(jumps, "-A "+h.Chain+" "+h.Rule.Spec)
				}
				want := []string{"-A FORWARD -p tcp -m nfacct --nfacct-name dropped -j KUBE-C", "-A FORWARD -j KUBE-A", "-A FORWARD -m set --match-set bad src -j KUBE-C", newer}
				if d := cmp.Diff(want, jumps); d != "" || len(n.held()) > 0 {
					t.Errorf("in quarantine %q; jumps (-want +got):\n%s", n.held(), d)
				}
				if lines := n.filterLines(); strings.Count(lines, "-j KUBE-D") != 1 || !strings.Contains(lines, newer) {
					t.Errorf("the table is\n%s", lines)
				}
			})
		})
	}
}
