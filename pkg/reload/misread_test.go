package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// misreadings are texts of nodeText of which iptables-restore makes another rule: the line that is
// missing in the end, and where it stands.
var misreadings = []struct {
	name, text, as, line, chain string
}{
	{"a match is lost", "-m mark --mark 0x8000/0x8000 -j DROP", "-j DROP", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP", "KUBE-FIREWALL"},
	{"one rule of a chain", "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", "-A KUBE-FORWARD -j ACCEPT", "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", "KUBE-FORWARD"},
	{"a jump", "-j KUBE-FORWARD", "-p tcp -j KUBE-FORWARD", "-A FORWARD -j KUBE-FORWARD", "FORWARD"},
}

// A rule of which iptables-restore makes another one is left out, the other one is removed, and
// the rest is back. No later try writes it again.
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

// What a failed proof left is judged as a loss until it is corrected, and as its owner's as soon as
// another process has written there.
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

// In a trial, too, the rule that stands afterwards must be the one that was tried.
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
	want := map[string]string{"-m mark --mark 0x8000/0x8000 -j DROP": errMisread.Error()}
	if diff := cmp.Diff(want, trial.bad); diff != "" {
		t.Errorf("bad (-want +got):\n%s", diff)
	}
}

// A declared rule that iptables spells in another way is the operator's: it stays.
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
