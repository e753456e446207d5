package reload

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

func TestPlantWritesMarksAndNothingElse(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		want := map[rules.TableName][]string{
			rules.Mangle: nil, rules.Nat: {"PREROUTING", "OUTPUT", "POSTROUTING"}, rules.Filter: {"INPUT", "FORWARD"},
		}
		got := map[rules.TableName][]string{}
		for table, mark := range tableid.Of(n.job.Marks, v4) {
			got[table] = mark.Witnessed
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("witnessed (-want +got):\n%s", d)
		}
		restores := n.Restores()
		result, err := n.replayer.Plant(t.Context(), n.job)
		must(t, err)
		n.outcome(result, v4, Skipped)
		if n.Restores() != restores {
			t.Error("standing marks were planted again")
		}

		n.flushAll(v4)
		left := n.content(v4)
		result, err = n.replayer.Plant(t.Context(), n.job)
		must(t, err)
		n.outcome(result, v4, Skipped) // lost marks are evidence
		result, err = n.replayer.Replant(t.Context(), n.job)
		must(t, err)
		n.outcome(result, v4, Proved)
		n.take(result)
		if d := cmp.Diff(left, n.content(v4)); d != "" {
			t.Errorf("planting touched rules (-before +now):\n%s", d)
		}
		n.marked(v4)
		if got := n.job.Marks[v4.Table(rules.Nat)].Witnessed; len(got) > 0 {
			t.Errorf("witnesses in %v, where no jumps stand", got)
		}
	})
}

func TestRotationGivesANewNonceAndTouchesNothingElse(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		old := n.job.Marks
		must(t, n.RestoreNoflush(v4, "*mangle\n-A OUTPUT -j KUBE-IPTABLES-HINT\nCOMMIT\n"))
		n.before[v4] = n.content(v4)
		result, err := n.replayer.Rotate(t.Context(), n.job)
		must(t, err)
		n.take(result)
		for _, f := range []rules.Family{v4, v6} {
			n.outcome(result, f, Proved)
			n.same(f)
			for _, table := range protect.Always() {
				if n.job.Marks[f.Table(table)].Nonce == old[f.Table(table)].Nonce {
					t.Errorf("%s %s keeps its nonce", f, table)
				}
			}
		}
		if d := cmp.Diff([]string{"OUTPUT"}, n.job.Marks[v4.Table(rules.Mangle)].Witnessed); d != "" {
			t.Errorf("a chain that was jumped since has no witness (-want +got):\n%s", d)
		}
	})
}

func TestRotationLeavesALossAlone(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.Flush(v4, rules.Nat, ""))
		result, err := n.replayer.Rotate(t.Context(), n.job)
		must(t, err)
		n.take(result)
		n.outcome(result, v4, Proved) // of the other tables
		if v := verdicts(n.heal()[v4])[rules.Nat]; v != canary.Emptied {
			t.Errorf("after the rotation nat is %s, want emptied", v)
		}
	})
}

// TestRotationDoesNotPaintOverAFlush: a flush between the rotation's read and its write must show
// afterwards.
func TestRotationDoesNotPaintOverAFlush(t *testing.T) {
	tests := []struct {
		name  string
		flush func(n *testNode, w iptablestest.Writer) error
		want  canary.Verdict
	}{
		{"-F", func(_ *testNode, w iptablestest.Writer) error { return w.Flush(v4, rules.Nat, "") }, canary.Emptied},
		{"-F of a built-in chain", func(_ *testNode, w iptablestest.Writer) error { return w.Flush(v4, rules.Nat, "OUTPUT") }, canary.JumpsMissing},
		{"-F of the canary", func(_ *testNode, w iptablestest.Writer) error {
			return w.Flush(v4, rules.Nat, canary.DefaultChain)
		}, canary.Emptied},
		{"an old file", func(n *testNode, w iptablestest.Writer) error {
			return w.Restore(v4, strings.ReplaceAll(n.SaveTable(v4, rules.Nat), "canaryd-canary:", "canaryd-canary:0"))
		}, canary.Replaced},
		{"somebody's file", func(_ *testNode, w iptablestest.Writer) error {
			return w.Restore(v4, "*nat\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n")
		}, canary.ChainDeleted},
	}
	for i, test := range slices.Concat(tests, tests) {
		byMarks := i < len(tests)
		t.Run(fmt.Sprintf("%s/by marks %t", test.name, byMarks), func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				n.job.Families, n.job.ByMarks = []rules.Family{v4}, byMarks
				done := false
				n.BeforeRestore(func() {
					if !done {
						done = true
						must(t, test.flush(n, n.Bypassing()))
					}
				})
				result, err := n.replayer.Rotate(t.Context(), n.job)
				must(t, err)
				n.BeforeRestore(nil)
				if tr := result[v4].Tables[rules.Nat]; tr.Proved || result[v4].Outcome.Done() {
					t.Errorf("the rotation is %s, nat proved: %v", result[v4].Outcome, tr.Proved)
				}
				n.take(result)
				healed := n.heal()
				if v := verdicts(healed[v4])[rules.Nat]; v != test.want {
					t.Errorf("after the rotation nat is %s, want %s", v, test.want)
				}
				n.outcome(healed, v4, Proved)
				n.marked(v4)
			})
		})
	}
}

func TestForceMakesExactlyTheGeneration(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.RestoreNoflush(v4, "*nat\n:KUBE-SVC-A - [0:0]\n:KUBE-SVC-B - [0:0]\n-A KUBE-SVC-A -j KUBE-SVC-B\n-A KUBE-SVC-B -j RETURN\n"+
			"-I OUTPUT -j KUBE-SVC-B\n-D PREROUTING -j KUBE-SERVICES\nCOMMIT\n"))
		result, err := n.replayer.Force(t.Context(), n.job)
		must(t, err)
		n.take(result)
		n.outcome(result, v4, Proved)
		n.same(v4)
		n.same(v6)
	})
}

func TestForceWritesIntoATableThatIsGone(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.DeleteTable(v4, rules.Nat))
	result, err := n.replayer.Force(t.Context(), n.job)
	must(t, err)
	n.take(result)
	n.outcome(result, v4, Proved)
	n.marked(v4)
	if !strings.Contains(n.SaveTable(v4, rules.Nat), "-A KUBE-SVC-A -j KUBE-MARK-MASQ\n") {
		t.Errorf("nat was not written:\n%s", n.SaveTable(v4, rules.Nat))
	}
}

func TestForceKnowsNothingOfTablesThatTheGenerationDoesNotHold(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		maps.DeleteFunc(n.job.Generation, func(id rules.TableID, _ rules.Section) bool { return id.Family == v6 })
		delete(n.job.Generation, v4.Table(rules.Filter))
		result, err := n.replayer.Force(t.Context(), n.job)
		must(t, err)
		n.take(result)
		n.same(v4)
		n.same(v6)
	})
}

func TestAReplacedTableThatWasNeverLearnedKeepsItsRules(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.job.Generation = nil
		must(t, n.Restore(v4, strings.ReplaceAll(n.SaveTable(v4, rules.Nat), "canaryd-canary:", "canaryd-canary:0")))
		result := n.heal()
		if v := verdicts(result[v4])[rules.Nat]; v != canary.Replaced {
			t.Errorf("nat is %s, want replaced", v)
		}
		n.same(v4)
	})
}

func TestRemoveTakesOurMarksAndOnRequestTheRules(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		// Witnesses of an earlier planting are removed, too.
		must(t, n.RestoreNoflush(v4, "*nat\n-A INPUT "+canary.Nonce("0").Witness().Spec+"\nCOMMIT\n"))
		result, err := n.replayer.Remove(t.Context(), n.job, false)
		must(t, err)
		for _, f := range []rules.Family{v4, v6} {
			n.outcome(result, f, Proved)
			if d := cmp.Diff(n.before[f], n.content(f)); d != "" {
				t.Errorf("removing marks touched rules (-before +now):\n%s", d)
			}
			if strings.Contains(n.Save(f), "canaryd") || strings.Contains(n.Save(f), canary.DefaultChain) {
				t.Errorf("marks are left:\n%s", n.Save(f))
			}
		}
		result, err = n.replayer.Remove(t.Context(), n.job, false)
		must(t, err)
		n.outcome(result, v4, Skipped)

		result, err = n.replayer.Remove(t.Context(), n.job, true)
		must(t, err)
		n.outcome(result, v4, Proved)
		for line := range strings.Lines(n.Save(v4)) {
			if strings.Contains(line, "KUBE-") && !strings.Contains(line, "-CANARY - ") {
				t.Errorf("%q is left", line)
			}
		}
		for _, line := range foreignRules {
			if !strings.Contains(n.Save(v4), line) {
				t.Errorf("the foreign %q is gone", line)
			}
		}
	})
}

func TestRemoveOfNothingBringsNoTableIntoBeing(t *testing.T) {
	n := newNode(t, iptables.NFT, nodeText, v4)
	must(t, n.FlushRuleset())
	result, err := n.replayer.Remove(t.Context(), n.job, true)
	must(t, err)
	n.outcome(result, v4, Skipped)
	if got := n.Save(v4); got != "" {
		t.Errorf("tables came into being:\n%s", got)
	}
}

func TestKubeProxyIsNudgedOnlyAfterItsChainsWereLost(t *testing.T) {
	tests := []struct {
		name  string
		flush func(n *testNode) error
		want  []string // payloads after the replay
	}{
		{"a flush of everything", func(n *testNode) error { n.flushAll(v4); return nil }, []string{"*nat", "*mangle"}},
		{"a flush of one table", func(n *testNode) error { return n.Flush(v4, rules.Filter, "") }, []string{"*nat", "*mangle"}},
		{
			"a flush of what kube-proxy wrote a moment before, and again since", func(n *testNode) error {
				const written = "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-NEW - [0:0]\n:KUBE-SVC-A - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n" +
					"-A KUBE-SERVICES -d 10.0.0.1/32 -j KUBE-SVC-A\n-A KUBE-SERVICES -d 10.0.0.2/32 -j KUBE-SVC-NEW\n" +
					"-A KUBE-SVC-A -j RETURN\n-A KUBE-MARK-MASQ -j RETURN\n-A KUBE-POSTROUTING -j RETURN\n"
				must(n.t, n.RestoreNoflush(v4, written+"-A KUBE-SVC-NEW -j RETURN\nCOMMIT\n"))
				must(n.t, n.Flush(v4, rules.Nat, ""))
				return n.RestoreNoflush(v4, strings.Replace(written, ":KUBE-SVC-NEW - [0:0]\n", "", 1)+"COMMIT\n")
			}, []string{"*nat", "*mangle"},
		},
		{"only jumps were lost", func(n *testNode) error { return n.Flush(v4, rules.Filter, "INPUT") }, nil},
		{"only the canary was lost", func(n *testNode) error { return n.Flush(v4, rules.Nat, canary.DefaultChain) }, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				must(t, test.flush(n))
				before := len(n.Payloads(v4))
				n.outcome(n.heal(), v4, Proved)
				var got []string
				for _, p := range n.Payloads(v4)[before+1:] {
					table, rest, _ := strings.Cut(p, "\n")
					got = append(got, table)
					if rest != ":KUBE-PROXY-CANARY - [0:0]\n-X KUBE-PROXY-CANARY\nCOMMIT\n" {
						t.Errorf("a nudge does more than it should:\n%s", p)
					}
				}
				if d := cmp.Diff(test.want, got); d != "" {
					t.Errorf("nudges (-want +got):\n%s", d)
				}
				saved := n.Save(v4)
				if gone := !strings.Contains(saved, "KUBE-PROXY-CANARY"); gone != (test.want != nil) {
					t.Errorf("kube-proxy's canary is gone: %v", gone)
				}
				if !strings.Contains(saved, "KUBE-KUBELET-CANARY") {
					t.Error("kubelet's canary is gone, by which iptables-wrappers choose the backend")
				}
				if strings.Count(n.Save(v6), ":KUBE-PROXY-CANARY") != 2 {
					t.Error("the other family's canaries were touched")
				}
			})
		})
	}
}

func TestExamineTellsWhatAReadShows(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		must(t, n.Flush(v4, rules.Nat, ""))
		must(t, n.RestoreNoflush(v4, "*filter\n-D INPUT -j KUBE-FIREWALL\nCOMMIT\n"))
		snapshot, err := n.Fake.Read(t.Context(), v4)
		must(t, err)
		tried := n.job.Marks[v4.Table(rules.Mangle)]
		n.job.Marks = n.job.Marks.With(v4.Table(rules.Mangle), canary.Mark{Nonce: "older"}.Trying(tried))
		examiner := Examiner{Canary: canary.DefaultChain, Protection: rules.Protection{Chain: protects}}
		for quiet, want := range map[bool]canary.Verdict{false: canary.Changed, true: canary.JumpsMissing} {
			n.job.Quiet[v4] = quiet
			got := examiner.Examine(snapshot, n.job)
			if v := got[rules.Filter].Finding.Verdict; v != want {
				t.Errorf("quiet %v: filter is %s, want %s", quiet, v, want)
			}
			if lost := got[rules.Nat].Lost; got[rules.Nat].Finding.Verdict != canary.Emptied || lost.Rules != 7 || len(lost.Chains) != 4 || len(lost.Jumps) != 3 {
				t.Errorf("nat is %s and lost %+v", got[rules.Nat].Finding.Verdict, lost)
			}
			if d := cmp.Diff(tried, got[rules.Mangle].Mark); d != "" || got[rules.Mangle].Finding.Verdict != canary.Intact {
				t.Errorf("mangle is %s, its mark (-want +got):\n%s", got[rules.Mangle].Finding.Verdict, d)
			}
		}
	})
}
