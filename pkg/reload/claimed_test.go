package reload

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// claimedText is a node with two owners' chains in nat. A declared source owns KUBE-*; DOCKER is
// learned.
const claimedText = `*nat
:DOCKER - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SVC-B - [0:0]
:corp - [0:0]
-A corp -j RETURN
-A DOCKER -i docker0 -j RETURN
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -i wg0 -j corp
-A PREROUTING -j DOCKER
-A OUTPUT -j KUBE-SERVICES
-A OUTPUT -o eth9 -j ACCEPT
-A POSTROUTING -j KUBE-POSTROUTING
-A POSTROUTING -o wg0 -j MASQUERADE
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
-A KUBE-SERVICES -p tcp -j KUBE-SVC-A
-A KUBE-SERVICES -p udp -j KUBE-SVC-B
-A KUBE-SVC-A -j KUBE-MARK-MASQ
-A KUBE-SVC-B -j KUBE-MARK-MASQ
COMMIT
`

func isKube(chain string) bool { return protects(chain) }

func protectsBoth(chain string) bool { return protects(chain) || chain == "DOCKER" }

// newClaimedNode returns a node whose rules are as declared.
func newClaimedNode(t *testing.T, backend iptables.Backend) *testNode {
	t.Helper()
	n := &testNode{Fake: iptablestest.NewFake(backend), t: t, before: map[rules.Family]string{}}
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: protectsBoth}}
	n.job = Job{Families: []rules.Family{v4, v6}, Generation: rules.Generation{}, Quiet: map[rules.Family]bool{}, Claimed: isKube}
	for _, f := range n.job.Families {
		must(t, n.RestoreNoflush(f, claimedText))
		snapshot, err := n.Fake.Read(t.Context(), f)
		must(t, err)
		for table, seen := range snapshot.Tables {
			n.job.Generation = n.job.Generation.With(f.Table(table), rules.Protection{Chain: protectsBoth}.Extract(seen, canary.IsMark))
		}
	}
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	for _, f := range n.job.Families {
		n.before[f] = n.content(f)
		n.marked(f)
	}
	return n
}

func onBothClaimed(t *testing.T, test func(t *testing.T, n *testNode)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { test(t, newClaimedNode(t, backend)) })
	}
}

// claimedDrifts are lines of iptables-restore --noflush, and the chains that differ from the
// declaration afterwards.
var claimedDrifts = []struct {
	name  string
	lines string
	lost  []string
	left  string // foreign lines that stay
}{
	{name: "a rule deleted", lines: "-D KUBE-SVC-A -j KUBE-MARK-MASQ", lost: []string{"KUBE-SVC-A"}},
	{name: "a rule changed", lines: "-D KUBE-SVC-A -j KUBE-MARK-MASQ\n-A KUBE-SVC-A -p tcp -j KUBE-MARK-MASQ", lost: []string{"KUBE-SVC-A"}},
	{name: "a rule added", lines: "-I KUBE-SVC-A -j RETURN", lost: []string{"KUBE-SVC-A"}},
	{name: "another order", lines: "-D KUBE-SERVICES -p tcp -j KUBE-SVC-A\n-A KUBE-SERVICES -p tcp -j KUBE-SVC-A", lost: []string{"KUBE-SERVICES"}},
	{name: "two chains swapped", lines: "-F KUBE-SERVICES\n-A KUBE-SERVICES -p udp -j KUBE-SVC-A\n-A KUBE-SERVICES -p tcp -j KUBE-SVC-B", lost: []string{"KUBE-SERVICES"}},
	{name: "a chain emptied", lines: "-F KUBE-SVC-B", lost: []string{"KUBE-SVC-B"}},
	{name: "a chain deleted", lines: "-D KUBE-SERVICES -p udp -j KUBE-SVC-B\n-F KUBE-SVC-B\n-X KUBE-SVC-B", lost: []string{"KUBE-SERVICES", "KUBE-SVC-B"}},
	{name: "an empty chain more", lines: ":KUBE-SVC-C - [0:0]"},
	{name: "a loop of chains more", lines: ":KUBE-SVC-C - [0:0]\n:KUBE-SVC-D - [0:0]\n-A KUBE-SVC-C -j KUBE-SVC-D\n-A KUBE-SVC-D -j KUBE-SVC-A"},
	{
		name:  "chains more, that declared ones and jumps lead to",
		lines: ":KUBE-SVC-C - [0:0]\n:KUBE-SVC-D - [0:0]\n-A KUBE-SVC-C -j KUBE-SVC-D\n-I KUBE-SVC-A -j KUBE-SVC-C\n-A KUBE-SVC-D -j KUBE-SVC-B\n-I INPUT -j KUBE-SVC-D\n-I OUTPUT -j KUBE-SVC-C",
		lost:  []string{"KUBE-SVC-A"},
	},
	{name: "a jump deleted", lines: "-D OUTPUT -j KUBE-SERVICES"},
	{name: "a jump more", lines: "-A INPUT -j KUBE-MARK-MASQ"},
	{name: "a jump reworded", lines: "-I PREROUTING -p tcp -j KUBE-SERVICES\n-D PREROUTING -j KUBE-SERVICES"},
	{name: "a jump doubled at the top", lines: "-I OUTPUT -j KUBE-SERVICES"},
	{name: "a jump doubled at the bottom", lines: "-A OUTPUT -j KUBE-SERVICES"},
	{name: "a jump doubled beyond a witness of ours", lines: "-A POSTROUTING -j KUBE-POSTROUTING\n-A POSTROUTING -j KUBE-POSTROUTING"},
	{name: "a jump moved behind foreign rules and doubled", lines: "-D OUTPUT -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES"},
	{
		name: "a jump out of a claimed chain", lines: "-I KUBE-SVC-A -j corp\n-A corp -j ACCEPT", lost: []string{"KUBE-SVC-A"},
		left: "-A corp -j ACCEPT\n",
	},
	{
		name: "what is not claimed changes beside it", lines: "-D KUBE-SVC-A -j KUBE-MARK-MASQ\n-A DOCKER -j ACCEPT", lost: []string{"KUBE-SVC-A"},
		left: "-A DOCKER -j ACCEPT\n",
	},
}

func TestHealWritesExactlyWhatIsDeclared(t *testing.T) {
	for _, test := range claimedDrifts {
		t.Run(test.name, func(t *testing.T) {
			onBothClaimed(t, func(t *testing.T, n *testNode) {
				must(t, n.RestoreNoflush(v4, "*nat\n"+test.lines+"\nCOMMIT\n"))
				marks := n.job.Marks
				result := n.heal()
				n.outcome(result, v4, Proved)
				n.outcome(result, v6, Skipped)
				tr := result[v4].Tables[rules.Nat]
				if tr.Finding.Verdict != canary.Drifted || len(tr.Finding.Drift) == 0 {
					t.Errorf("%s %v, want drifted", tr.Finding.Verdict, tr.Finding.Drift)
				}
				if d := cmp.Diff(test.lost, tr.Lost.names()); d != "" {
					t.Errorf("lost (-want +got):\n%s", d)
				}
				if d := cmp.Diff(marks, n.job.Marks); d != "" {
					t.Errorf("the marks were renewed:\n%s", d)
				}
				n.marked(v4)
				got := n.content(v4)
				if test.left != "" && !strings.Contains(got, test.left) {
					t.Errorf("%q was taken away", test.left)
				}
				if d := cmp.Diff(n.before[v4], strings.Replace(got, test.left, "", 1)); d != "" {
					t.Errorf("(-before +now):\n%s", d)
				}
				n.same(v6)
				if again := n.heal(); again[v4].Outcome != Skipped {
					t.Errorf("a second look finds %v", verdicts(again[v4]))
				}
			})
		})
	}
}

// TestWithoutClaimTheSameIsLeftAlone: without a claim the same change is its owner's decision, or
// waits for the grace.
func TestWithoutClaimTheSameIsLeftAlone(t *testing.T) {
	for _, test := range claimedDrifts {
		t.Run(test.name, func(t *testing.T) {
			onBothClaimed(t, func(t *testing.T, n *testNode) {
				n.job.Claimed = nil
				if slices.Contains([]string{"a chain emptied", "a chain deleted", "a rule deleted", "what is not claimed changes beside it"}, test.name) {
					return // the judge finds these losses without a claim, too; other tests check them
				}
				must(t, n.RestoreNoflush(v4, "*nat\n"+test.lines+"\nCOMMIT\n"))
				left := n.content(v4)
				n.outcome(n.heal(), v4, Skipped)
				if d := cmp.Diff(left, n.content(v4)); d != "" {
					t.Errorf("(-before +now):\n%s", d)
				}
			})
		})
	}
}

// TestAFlushOfClaimedAndLearnedChains: after a flush, owners write to both kinds of chains. The
// claimed chains become exactly as declared. The learned chain stays as its owner wrote it.
func TestAFlushOfClaimedAndLearnedChains(t *testing.T) {
	onBothClaimed(t, func(t *testing.T, n *testNode) {
		must(t, n.Flush(v4, rules.Nat, ""))
		must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-C - [0:0]\n-A KUBE-SVC-A -j RETURN\n-A DOCKER -j ACCEPT\n-A OUTPUT -p tcp -j KUBE-SERVICES\n-A KUBE-SVC-C -j RETURN\nCOMMIT\n"))
		marks := n.job.Marks
		result := n.heal()
		n.outcome(result, v4, Proved)
		n.marked(v4)
		if n.job.Marks[v4.Table(rules.Nat)].Nonce == marks[v4.Table(rules.Nat)].Nonce {
			t.Error("a table that lost its canary keeps its nonce")
		}
		if got := result[v4].Tables[rules.Nat]; got.Finding.Verdict != canary.Emptied || !slices.Equal(got.Skipped, []string{"DOCKER"}) {
			t.Errorf("%s, skipped %v", got.Finding.Verdict, got.Skipped)
		}
		saved := n.SaveTable(v4, rules.Nat)
		for line, want := range map[string]int{
			"-A KUBE-SVC-A -j RETURN\n": 0, "-A KUBE-SVC-A -j KUBE-MARK-MASQ\n": 1, "KUBE-SVC-C": 0,
			"-A OUTPUT -p tcp -j KUBE-SERVICES\n": 0, "-A OUTPUT -j KUBE-SERVICES\n": 1, "-A PREROUTING -j KUBE-SERVICES\n": 1,
			"-A DOCKER -j ACCEPT\n": 1, "-A DOCKER -i docker0 -j RETURN\n": 0, "-A PREROUTING -j DOCKER\n": 1,
		} {
			if got := strings.Count(saved, line); got != want {
				t.Errorf("%q stands %d times, want %d", line, got, want)
			}
		}
	})
}

// TestADeclarationIntoEmptyTables: a declaration is written to tables that are empty or, on nft, do
// not exist.
func TestADeclarationIntoEmptyTables(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			full := newClaimedNode(t, backend)
			n := &testNode{Fake: iptablestest.NewFake(backend), t: t, replayer: full.replayer, job: full.job}
			n.replayer.Kernel = n.Fake
			own, _ := full.job.Generation[v4.Table(rules.Nat)].Split(isKube)
			n.job.Generation, n.job.Marks = rules.Generation{v4.Table(rules.Nat): own}, nil
			result, err := n.replayer.Plant(t.Context(), n.job)
			must(t, err)
			n.take(result)
			result = n.heal()
			n.outcome(result, v4, Proved)
			n.outcome(result, v6, Skipped)
			var want strings.Builder
			for line := range strings.Lines(full.content(v4)) {
				if !strings.Contains(line, "DOCKER") && !strings.Contains(line, "corp") && !strings.Contains(line, "wg0") && !strings.Contains(line, "eth9") {
					want.WriteString(line)
				}
			}
			natOf := func(text string) string {
				return text[strings.Index(text, "*nat"):][:strings.Index(text[strings.Index(text, "*nat"):], "COMMIT")]
			}
			if d := cmp.Diff(natOf(want.String()), natOf(n.content(v4))); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			// The declaration ends, and all its rules are removed.
			n.job.Generation = rules.Generation{}
			n.outcome(n.heal(), v4, Proved)
			if strings.Contains(n.content(v4), "KUBE") {
				t.Errorf("something declared is left:\n%s", n.content(v4))
			}
		})
	}
}

// TestAnExtraChainThatOthersHoldStays: an undeclared chain stays while a learned or foreign chain
// jumps to it, because it cannot be deleted. The other chains become as declared, and the extra
// chain is no drift.
func TestAnExtraChainThatOthersHoldStays(t *testing.T) {
	for _, holder := range []string{"corp", "DOCKER"} {
		onBothClaimed(t, func(t *testing.T, n *testNode) {
			must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-C - [0:0]\n:KUBE-SVC-D - [0:0]\n:KUBE-SVC-E - [0:0]\n-A KUBE-SVC-C -j KUBE-SVC-D\n"+
				"-A KUBE-SVC-E -j KUBE-SVC-D\n-A "+holder+" -j KUBE-SVC-C\n-F KUBE-SVC-B\nCOMMIT\n"))
			n.outcome(n.heal(), v4, Proved)
			saved := n.SaveTable(v4, rules.Nat)
			for _, line := range []string{"-A " + holder + " -j KUBE-SVC-C\n", "-A KUBE-SVC-C -j KUBE-SVC-D\n", "-A KUBE-SVC-B -j KUBE-MARK-MASQ\n"} {
				if !strings.Contains(saved, line) {
					t.Errorf("%q is missing", line)
				}
			}
			if strings.Contains(saved, "KUBE-SVC-E") {
				t.Error("KUBE-SVC-E, which nobody jumps to, is still there")
			}
			n.outcome(n.heal(), v4, Skipped)
			// Without a jump to it, the chain is deleted.
			must(t, n.RestoreNoflush(v4, "*nat\n-D "+holder+" -j KUBE-SVC-C\nCOMMIT\n"))
			n.outcome(n.heal(), v4, Proved)
			n.same(v4)
		})
	}
}

func TestTheProofOfADeclarationFailsIfSomethingDiffers(t *testing.T) {
	tests := []struct {
		name  string
		nft   bool // on legacy the lock keeps other processes out
		spoil func(n *testNode)
	}{
		{name: "nothing was written", spoil: func(n *testNode) { n.Lie(1) }},
		{name: "the kernel refused", spoil: func(n *testNode) { n.FailRestores(1, iptables.ReasonOther) }},
		{name: "a rule slipped in", spoil: func(n *testNode) {
			n.slip("-A KUBE-SVC-B -j RETURN")
		}},
		{name: "a chain slipped in", spoil: func(n *testNode) { n.slip(":KUBE-SVC-C - [0:0]") }},
		{name: "a jump slipped in", spoil: func(n *testNode) { n.slip("-A INPUT -j KUBE-SVC-A") }},
		{name: "a jump was doubled meanwhile", spoil: func(n *testNode) { n.slip("-A OUTPUT -j KUBE-SERVICES") }},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			onBothClaimed(t, func(t *testing.T, n *testNode) {
				must(t, n.RestoreNoflush(v4, "*nat\n-F KUBE-SVC-A\nCOMMIT\n"))
				test.spoil(n)
				fr := n.heal()[v4]
				if fr.Outcome.Done() || fr.Err == nil || fr.Tables[rules.Nat].Proved {
					t.Errorf("%s: %v", fr.Outcome, fr.Err)
				}
				n.outcome(n.heal(), v4, Proved)
				n.same(v4)
			})
		})
	}
}

// slip makes another process write once between a restore's check and its write.
func (n *testNode) slip(line string) {
	done := false
	n.BeforeRestore(func() {
		if !done {
			done = true
			must(n.t, n.Bypassing().RestoreNoflush(v4, "*nat\n"+line+"\nCOMMIT\n"))
		}
	})
}

func TestWhatCannotBeReadIsNotHeldToTheDeclaration(t *testing.T) {
	n := newClaimedNode(t, iptables.NFT)
	must(t, n.RestoreNoflush(v4, "*nat\n-F KUBE-SVC-A\nCOMMIT\n"))
	n.DropTableFromReads(v4, rules.Nat, errors.New("incompatible"))
	n.outcome(n.heal(), v4, Skipped)
	n.DropTableFromReads(v4, rules.Nat, nil)
	n.outcome(n.heal(), v4, Proved)
	n.same(v4)
}
