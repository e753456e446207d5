package reload

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestHealBringsBackWhatAFlushTookAndNothingElse(t *testing.T) {
	// The content afterwards: everything, or everything but foreign rules.
	all, ours := func(s string) string { return s }, withoutForeign
	tests := []struct {
		name  string
		nft   bool // only nft can do it
		flush func(n *testNode) error
		want  map[rules.TableName]canary.Verdict
		after func(string) string
	}{
		{
			name: "nothing", flush: func(*testNode) error { return nil }, after: all,
			want: map[rules.TableName]canary.Verdict{},
		},
		{
			name: "iptables -F in every table", flush: func(n *testNode) error { n.flushAll(v4); return nil }, after: ours,
			want: map[rules.TableName]canary.Verdict{rules.Mangle: canary.Emptied, rules.Nat: canary.Emptied, rules.Filter: canary.Emptied},
		},
		{
			name: "iptables -t nat -F alone", flush: func(n *testNode) error { return n.Flush(v4, rules.Nat, "") },
			want: map[rules.TableName]canary.Verdict{rules.Nat: canary.Emptied},
		},
		{
			name:  "iptables -F INPUT",
			flush: func(n *testNode) error { return n.Flush(v4, rules.Filter, "INPUT") },
			want:  map[rules.TableName]canary.Verdict{rules.Filter: canary.JumpsMissing},
		},
		{
			name:  "iptables -t nat -F KUBE-SERVICES",
			flush: func(n *testNode) error { return n.Flush(v4, rules.Nat, "KUBE-SERVICES") }, after: all,
			want: map[rules.TableName]canary.Verdict{rules.Nat: canary.Emptied},
		},
		{
			name:  "the canary alone",
			flush: func(n *testNode) error { return n.Flush(v4, rules.Mangle, canary.DefaultChain) }, after: all,
			want: map[rules.TableName]canary.Verdict{rules.Mangle: canary.Emptied},
		},
		{
			name: "nft flush table", nft: true,
			flush: func(n *testNode) error { return n.FlushTable(v4, rules.Nat) },
			want:  map[rules.TableName]canary.Verdict{rules.Nat: canary.Emptied},
		},
		{
			name: "iptables-restore of another table's content",
			flush: func(n *testNode) error {
				return n.Restore(v4, "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n:OUTPUT ACCEPT [0:0]\n:corp - [0:0]\n-A corp -j RETURN\n"+
					"-A FORWARD -i tun0 -j ACCEPT\n-A INPUT -i lo -j ACCEPT\nCOMMIT\n")
			},
			after: all, want: map[rules.TableName]canary.Verdict{rules.Filter: canary.ChainDeleted},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				if test.nft && n.Info().Backend != iptables.NFT {
					return
				}
				must(t, test.flush(n))
				left := n.content(v4)
				result := n.heal()
				want := map[rules.TableName]canary.Verdict{rules.Mangle: canary.Intact, rules.Nat: canary.Intact, rules.Filter: canary.Intact}
				outcome := Skipped
				for table, v := range test.want {
					want[table] = v
					outcome = Proved
				}
				n.outcome(result, v4, outcome)
				n.outcome(result, v6, Skipped)
				if d := cmp.Diff(want, verdicts(result[v4])); d != "" {
					t.Errorf("verdicts (-want +got):\n%s", d)
				}
				n.marked(v4)
				n.same(v6)
				got := strings.ReplaceAll(n.content(v4), ":KUBE-PROXY-CANARY - [0:0]\n", "")
				for line := range strings.Lines(left) {
					if !strings.Contains(got, line) && !strings.Contains(line, "KUBE-PROXY-CANARY") {
						t.Errorf("the replay took %q away", line)
					}
				}
				if test.after != nil {
					before := strings.ReplaceAll(test.after(n.before[v4]), ":KUBE-PROXY-CANARY - [0:0]\n", "")
					if d := cmp.Diff(before, got); d != "" {
						t.Errorf("(-before +now):\n%s", d)
					}
				}
				if again := n.heal(); again[v4].Outcome != Skipped {
					t.Errorf("a second look finds %v", verdicts(again[v4]))
				}
			})
		})
	}
}

func TestNftFlushRulesetTakesBothFamiliesAndBothComeBack(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4, v6)
	must(t, n.FlushRuleset())
	// The chain of another owner that a protected rule depends on is gone for good, so that rule is
	// left out and reported.
	result := n.heal()
	for _, f := range []rules.Family{v4, v6} {
		n.outcome(result, f, Partial)
		n.marked(f)
		filter := result[f].Tables[rules.Filter]
		list := []QuarantinedRule{
			{Chain: "KUBE-FORWARD", Rule: rule("-j corp"), Reason: "chain corp is missing", MissingChain: "corp"},
			{
				Chain: "KUBE-FORWARD", Rule: rule("-m mark --mark 0x4000/0x4000 -j ACCEPT"), Waits: true,
				Reason: `waits behind "-j corp" of KUBE-FORWARD, which cannot be put back`,
			},
		}
		if d := cmp.Diff(list, filter.Quarantined); d != "" {
			t.Errorf("quarantined (-want +got):\n%s", d)
		}
		if !filter.Proved || filter.Finding.Verdict != canary.TableDeleted || !strings.Contains(result[f].Err.Error(), "corp") {
			t.Errorf("filter: %+v, %v", filter.Finding, result[f].Err)
		}
		for _, line := range []string{":KUBE-FORWARD", "-A FORWARD -j KUBE-FORWARD", "-A KUBE-SVC-A -j KUBE-MARK-MASQ", ":KUBE-IPTABLES-HINT"} {
			if strings.Count(n.Save(f), line) != 1 {
				t.Errorf("%s: %q stands %d times", f, line, strings.Count(n.Save(f), line))
			}
		}
		if strings.Contains(n.Save(f), "KUBE-PROXY-CANARY") {
			t.Errorf("%s: another owner's canary was replayed", f)
		}
	}
}

func TestTenFlushesMakeNoDoubles(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		want := strings.ReplaceAll(withoutForeign(n.before[v4]), ":KUBE-PROXY-CANARY - [0:0]\n", "")
		for i := range 10 {
			n.flushAll(v4)
			n.outcome(n.heal(), v4, Proved)
			if d := cmp.Diff(want, n.content(v4)); d != "" {
				t.Fatalf("after flush %d (-want +got):\n%s", i+1, d)
			}
			n.marked(v4)
		}
	})
}

func TestAReplayDeclaresNoBuiltInChainSetsNoPolicyAndEndsWithTheCanary(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.SetPolicy(v4, rules.Filter, "OUTPUT", "DROP"))
		n.flushAll(v4)
		result := n.heal()
		n.outcome(result, v4, Proved)
		if d := cmp.Diff([]string{"filter OUTPUT: DROP, was ACCEPT"}, result[v4].Tables[rules.Filter].Policies); d != "" {
			t.Errorf("policies (-want +got):\n%s", d)
		}
		payloads := n.Payloads(v4)
		for _, payload := range payloads {
			for _, chain := range rules.BuiltinChains(rules.Mangle) {
				if strings.Contains(payload, ":"+chain+" ") || strings.Contains(payload, "-P ") || strings.Contains(payload, "-F "+chain+"\n") {
					t.Errorf("%s is declared, flushed or gets a policy:\n%s", chain, payload)
				}
			}
		}
		replay := payloads[1] // after planting; nudges follow
		sections := strings.SplitAfter(replay, "COMMIT\n")
		if len(sections) != 4 {
			t.Fatalf("one restore with three tables was wanted:\n%s", replay)
		}
		for _, s := range sections[:3] {
			lines := strings.Split(strings.TrimSpace(s), "\n")
			declared := slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return l[0] != ':' })
			if !slices.IsSortedFunc(declared, func(a, b string) int { return strings.Compare(b, a) }) || len(declared) == 0 {
				t.Errorf("declarations do not descend, which costs iptables-nft-restore seconds: %q", declared)
			}
			if last := lines[len(lines)-2]; !strings.HasPrefix(last, "-A "+canary.DefaultChain+" ") {
				t.Errorf("the last line of %s is %q and not the canary", lines[0], last)
			}
		}
	})
}

func TestAReplayLeavesAloneWhatTheOwnerWasFasterToRestore(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.Flush(v4, rules.Nat, ""))
		must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-A - [0:0]\n-A KUBE-SVC-A -j RETURN\n-I PREROUTING -p tcp -j KUBE-SERVICES\n-I OUTPUT -j KUBE-SERVICES\nCOMMIT\n"))
		result := n.heal()
		n.outcome(result, v4, Proved)
		tr := result[v4].Tables[rules.Nat]
		if d := cmp.Diff([]string{"KUBE-SVC-A"}, tr.Skipped); d != "" {
			t.Errorf("skipped (-want +got):\n%s", d)
		}
		saved := n.SaveTable(v4, rules.Nat)
		for line, want := range map[string]int{
			"-A KUBE-SVC-A -j RETURN\n": 1, "-A KUBE-SVC-A -j KUBE-MARK-MASQ\n": 0, // newer than the generation
			"-A PREROUTING -p tcp -j KUBE-SERVICES\n": 1, "-A PREROUTING -j KUBE-SERVICES\n": 0, // superseded
			"-A OUTPUT -j KUBE-SERVICES\n": 1, "-A POSTROUTING -j KUBE-POSTROUTING\n": 1,
		} {
			if got := strings.Count(saved, line); got != want {
				t.Errorf("%q stands %d times, want %d", line, got, want)
			}
		}
	})
}

func TestSavedRulesFromThePastMakeWayForExactlyTheGeneration(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		// The file was saved with older canaries and older rules.
		old := strings.NewReplacer(
			"-A KUBE-SVC-A -j KUBE-MARK-MASQ\n", "-A KUBE-SVC-A -j KUBE-SVC-OLD\n-A KUBE-SVC-OLD -j KUBE-SVC-OLDER\n-A KUBE-SVC-OLDER -j RETURN\n",
			":KUBE-SVC-A - [0:0]\n", ":KUBE-SVC-A - [0:0]\n:KUBE-SVC-OLD - [0:0]\n:KUBE-SVC-OLDER - [0:0]\n",
			"-A OUTPUT -j KUBE-SERVICES\n", "-A OUTPUT -j KUBE-SVC-OLD\n-A OUTPUT -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n",
			"-A POSTROUTING -j KUBE-POSTROUTING\n", "", // it is placed behind its neighbour, counted without the stale jump
			"-A POSTROUTING -o wg0 -j MASQUERADE\n", "-A POSTROUTING -j KUBE-SVC-OLD\n-A POSTROUTING -o wg0 -j MASQUERADE\n",
			"canaryd-canary:", "canaryd-canary:0", "canaryd-witness:", "canaryd-witness:0",
		).Replace(n.SaveTable(v4, rules.Nat))
		must(t, n.Restore(v4, old))
		result := n.heal()
		n.outcome(result, v4, Proved)
		if got := result[v4].Tables[rules.Nat]; got.Finding.Verdict != canary.Replaced || !slices.Equal(got.Lost.names(), []string{"KUBE-SVC-A"}) {
			t.Errorf("%s, lost %v; want replaced, lost KUBE-SVC-A", got.Finding.Verdict, got.Lost.names())
		}
		n.nudged(v4)
		n.same(v4)
	})
}

// nudged checks that the replay requested a sync from kube-proxy by deleting its canaries, and puts
// these back as kube-proxy does.
func (n *testNode) nudged(f rules.Family) {
	n.t.Helper()
	if strings.Contains(n.Save(f), "KUBE-PROXY-CANARY") {
		n.t.Errorf("%s: KUBE-PROXY-CANARY still stands", f)
	}
	for _, table := range []string{"*mangle", "*nat"} {
		must(n.t, n.RestoreNoflush(f, table+"\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"))
	}
}

func TestSavedRulesKeepAnOldChainThatAStrangerJumpsTo(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		old := strings.NewReplacer(
			":KUBE-SVC-A - [0:0]\n", ":KUBE-SVC-A - [0:0]\n:KUBE-SVC-OLD - [0:0]\n:KUBE-SVC-OLDER - [0:0]\n",
			"-A corp -j RETURN\n", "-A corp -j KUBE-SVC-OLD\n-A KUBE-SVC-OLD -j KUBE-SVC-OLDER\n",
			"canaryd-canary:", "canaryd-canary:0",
		).Replace(n.SaveTable(v4, rules.Nat))
		must(t, n.Restore(v4, old))
		n.outcome(n.heal(), v4, Proved)
		n.marked(v4)
		if saved := n.SaveTable(v4, rules.Nat); !strings.Contains(saved, "-A KUBE-SVC-OLD -j KUBE-SVC-OLDER\n") {
			t.Errorf("a chain that corp jumps to is broken:\n%s", saved)
		}
	})
}

func TestAJumpWhoseChainItsOwnerRemovedIsNotPutBack(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		// The owner removes its chain. Before canaryd has learned that, another process flushes
		// INPUT.
		must(t, n.RestoreNoflush(v4, "*filter\n-D INPUT -j KUBE-FIREWALL\n-F KUBE-FIREWALL\n-X KUBE-FIREWALL\n-F INPUT\nCOMMIT\n"))
		n.outcome(n.heal(), v4, Proved)
		n.marked(v4)
		if saved := n.SaveTable(v4, rules.Filter); strings.Contains(saved, "KUBE-FIREWALL") {
			t.Errorf("the removed chain is back:\n%s", saved)
		}
	})
}

func TestJumpsDeletedByNameComeBackOnlyWhenQuiet(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.RestoreNoflush(v4, "*nat\n-D POSTROUTING -j KUBE-POSTROUTING\nCOMMIT\n"))
		n.outcome(n.heal(), v4, Skipped)
		n.job.Quiet[v4] = true
		result := n.heal()
		n.outcome(result, v4, Proved)
		n.same(v4) // behind its neighbour
		if lost := result[v4].Tables[rules.Nat].Lost; lost.Rules != 1 || len(lost.Jumps) != 1 {
			t.Errorf("lost %+v, want one jump", lost)
		}
	})
}
