package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// misreadings are texts of nodeText that iptables-restore reads as another rule, with the line that
// is missing in the end, and its chain.
var misreadings = []struct {
	name, text, as, line, chain string
}{
	{"a match is lost", "-m mark --mark 0x8000/0x8000 -j DROP", "-j DROP", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP", "KUBE-FIREWALL"},
	{"one rule of a chain", "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", "-A KUBE-FORWARD -j ACCEPT", "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", "KUBE-FORWARD"},
	{"a jump", "-j KUBE-FORWARD", "-p tcp -j KUBE-FORWARD", "-A FORWARD -j KUBE-FORWARD", "FORWARD"},
}

// TestAMisreadRuleIsWrittenOnce: iptables-restore makes another rule of a text. That rule is
// removed, the rest is back, and no later try writes the text again.
func TestAMisreadRuleIsWrittenOnce(t *testing.T) {
	for _, c := range misreadings {
		t.Run(c.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, n *testNode) {
				reference := newNode(t, n.Info().Backend, nodeText, v4, v6)
				must(t, reference.Flush(v4, rules.Filter, ""))
				reference.heal()
				want := strings.Replace(reference.content(v4), c.line+"\n", "", 1)
				n.Misread(c.text, c.as)
				must(t, n.Flush(v4, rules.Filter, ""))
				result := n.heal()
				filter := result[v4].Tables[rules.Filter]
				if !filter.Proved || result[v4].Outcome != Partial || !filter.Finding.MarkLost || filter.Lost.Rules < 3 {
					t.Errorf("proved %t, %s, found %+v, lost %+v: %v", filter.Proved, result[v4].Outcome, filter.Finding, filter.Lost, result[v4].Err)
				}
				if q := filter.Quarantined; len(q) != 1 || q[0].Chain != c.chain || !q[0].Misread || q[0].Reason != errMisread.Error() {
					t.Errorf("in quarantine: %+v", q)
				}
				if got := n.content(v4); got != want {
					t.Errorf("the rest is not back (-want +got):\n%s", cmp.Diff(want, got))
				}
				n.job.Quarantine = n.job.Quarantine.With(v4.Table(rules.Filter), filter.Quarantined)
				written := len(n.Payloads(v4))
				for range 50 {
					readmitted, err := n.replayer.Readmit(t.Context(), n.job)
					must(t, err)
					n.take(readmitted)
				}
				must(t, n.Flush(v4, rules.Filter, ""))
				n.heal()
				for _, payload := range n.Payloads(v4)[written:] {
					if strings.Contains(payload, c.text) {
						t.Errorf("it is written again:\n%s", payload)
					}
				}
				if got := n.content(v4); got != want {
					t.Errorf("after the second flush (-want +got):\n%s", cmp.Diff(want, got))
				}
			})
		})
	}
}

// TestAFailedProofIsALossUntilAnotherProcessWrites: rules that a failed proof left are a loss until
// they are corrected. Once another process has written there, they are its decision.
func TestAFailedProofIsALossUntilAnotherProcessWrites(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		examine := func() canary.Finding {
			snapshot, err := n.Fake.Read(t.Context(), v4)
			must(t, err)
			e := Examiner{Canary: canary.DefaultChain, Protection: n.replayer.Protection}
			return e.Examine(snapshot, n.job)[rules.Filter].Finding
		}
		chain := rules.Chain{Name: "KUBE-FIREWALL", Rules: []rules.Rule{{Spec: "-j DROP", Target: "DROP"}}}
		n.job.Memory = n.job.Memory.After(Result{v4: {Tables: map[rules.TableName]TableResult{rules.Filter: {
			misread: misread{chains: map[string][]rules.Rule{chain.Name: chain.Rules}},
		}}}})
		if got := examine().Verdict; got != canary.Intact {
			t.Errorf("as the generation has it, the table is %s", got)
		}
		must(t, n.RestoreNoflush(v4, "*filter\n:KUBE-FIREWALL - [0:0]\n-A KUBE-FIREWALL -j DROP\nCOMMIT\n"))
		if got := examine(); got.Verdict != canary.Emptied || cmp.Diff([]string{chain.Name}, got.Emptied) != "" {
			t.Errorf("as the write left it, the table is %s: %+v", got.Verdict, got)
		}
		must(t, n.RestoreNoflush(v4, "*filter\n-A KUBE-FIREWALL -p tcp -j DROP\nCOMMIT\n"))
		if got := examine().Verdict; got != canary.Changed {
			t.Errorf("as another process left it, the table is %s", got)
		}
	})
}

// TestATrialComparesWhatItReadsBack: in a trial, too, the rule in the kernel must equal the tried
// rule.
func TestATrialComparesWhatItReadsBack(t *testing.T) {
	n := newNode(t, iptables.Legacy, nodeText, v4)
	n.Misread("--mark 0x8000/0x8000", "--mark 0x8000")
	s, err := n.Begin(t.Context())
	must(t, err)
	defer s.Close()
	snapshot, err := s.Read(t.Context(), v4)
	must(t, err)
	section := n.job.Generation[v4.Table(rules.Filter)]
	trial := newTrial(s, v4, tablePlan{table: rules.Filter, wrote: section.Chains, jumps: section.Jumps, seen: snapshot.Tables[rules.Filter]})
	trial.readsBack = true
	must(t, trial.run(t.Context()))
	want := reasons{"-m mark --mark 0x8000/0x8000 -j DROP": errMisread.Error()}
	if diff := cmp.Diff(want, trial.bad); diff != "" {
		t.Errorf("bad (-want +got):\n%s", diff)
	}
}

// TestADeclaredRuleInOtherWordsStays: iptables prints a declared rule in other words. It is the
// operator's, so it stays.
func TestADeclaredRuleInOtherWordsStays(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.job.Claimed = func(chain string) bool { return chain == "KUBE-FIREWALL" }
		n.Misread("-m mark --mark 0x8000/0x8000 -j DROP", "-m mark --mark 0x8000/0x8000 -m foo --bar 8 -j DROP")
		must(t, n.Flush(v4, rules.Filter, ""))
		result := n.heal()
		if q := result[v4].Tables[rules.Filter].Quarantined; len(q) != 0 {
			t.Errorf("in quarantine: %+v", q)
		}
		if !strings.Contains(n.content(v4), "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -m foo --bar 8 -j DROP") {
			t.Errorf("it is gone:\n%s", n.content(v4))
		}
	})
}

// strayText has a chain that a replay may have to merge, and jumps in an order.
const strayText = `*filter
:FORWARD DROP [0:0]
:KUBE-A - [0:0]
:KUBE-B - [0:0]
:KUBE-C - [0:0]
-A FORWARD -j KUBE-A
-A FORWARD -p tcp -j KUBE-B
-A FORWARD -p icmp -j KUBE-C
-A KUBE-A -p udp -j ACCEPT
-A KUBE-A -p icmp -j DROP
-A KUBE-A -p sctp -j RETURN
-A KUBE-A -p tcp -m tcp --dport 80 -j DROP
-A KUBE-A -m set --match-set bad src -j DROP
-A KUBE-A -j ACCEPT
-A KUBE-B -j ACCEPT
-A KUBE-C -j RETURN
COMMIT
`

// filterLines returns the table filter without canaryd's marks.
func (n *testNode) filterLines() string {
	n.t.Helper()
	_, lines, found := strings.Cut(n.content(v4), "*filter\n")
	if !found {
		n.t.Fatalf("there is no filter:\n%s", n.Save(v4))
	}
	return lines
}

// TestAStrayGoesAlone: a misread text added a rule to a chain of others. canaryd removes only that
// rule, once. Missing rules return to their place.
func TestAStrayGoesAlone(t *testing.T) {
	const stray = "-p udp -m udp --dport 9 -j ACCEPT"
	lineOf := func(chain string) string { return "-A " + chain + " " + stray + "\n" }
	tests := []struct {
		name, chain string
		during      string // in addition to the stray
		piecewise   bool
		force       bool
		lost        string // the line that cannot be put back, "" if all are
	}{
		{"a chain that is merged on request", "KUBE-A", "-D KUBE-A 5\n-D KUBE-A 1\n", false, true, "-A KUBE-A -m set --match-set bad src -j DROP\n"},
		{"a piecewise chain", "KUBE-A", "-D KUBE-A 3\n-F KUBE-CANARYD-CANARY\n", true, false, ""},
		{"a built-in chain", "FORWARD", "-D FORWARD -p tcp -j KUBE-B\n", false, false, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachNodeOf(t, strayText, func(t *testing.T, n *testNode) {
				want := strings.Replace(n.filterLines(), test.lost, "", 1)
				n.job.Quiet = map[rules.Family]bool{v4: true}
				n.replayer.Protection.Piecewise = func(chain string) bool { return test.piecewise && chain == "KUBE-A" }
				must(t, n.RestoreNoflush(v4, "*filter\n"+test.during+"-I "+test.chain+" 1 "+stray+"\nCOMMIT\n"))
				if test.lost != "" {
					n.loseBad()
				}
				n.job.Memory = n.job.Memory.After(Result{v4: {Tables: map[rules.TableName]TableResult{rules.Filter: {
					misread: misread{strays: map[string][]rules.Rule{test.chain: ruleList(stray)}},
				}}}})
				if !strings.Contains(n.content(v4), lineOf(test.chain)) {
					t.Fatalf("there is no stray:\n%s", n.content(v4))
				}
				replay := n.replayer.Heal
				if test.force {
					replay = n.replayer.Force
				}
				result, err := replay(t.Context(), n.job)
				must(t, err)
				if !result[v4].Tables[rules.Filter].Proved {
					t.Errorf("it is not proved: %v", result[v4].Err)
				}
				if d := cmp.Diff(want, n.filterLines()); d != "" {
					t.Errorf("(-want +got):\n%s", d)
				}
			})
		})
	}
}

// TestAReplayOnRequestTakesItsStrayAway: the same in one replay on request. The misread text adds a
// stray, and the second write removes it.
func TestAReplayOnRequestTakesItsStrayAway(t *testing.T) {
	eachNodeOf(t, strayText, func(t *testing.T, n *testNode) {
		must(t, n.RestoreNoflush(v4, "*filter\n-D KUBE-A 5\n-D KUBE-A 1\nCOMMIT\n"))
		want := n.filterLines()
		n.loseBad()
		n.Misread("-p udp -j ACCEPT", "-p udp -m udp --dport 9 -j ACCEPT")
		result, err := n.replayer.Force(t.Context(), n.job)
		must(t, err)
		if q := result[v4].Tables[rules.Filter].Quarantined; len(q) != 2 || !q[0].Misread {
			t.Errorf("in quarantine: %+v", q)
		}
		if d := cmp.Diff(want, n.filterLines()); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}
