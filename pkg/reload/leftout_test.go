package reload

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// leftOutSection has a chain that is left out, a chain that is not, and a jump in OUTPUT.
func leftOutSection(chains ...rules.Chain) rules.Section {
	accept := []rules.Rule{{Spec: "-j ACCEPT", Target: "ACCEPT"}}
	return rules.Section{
		Chains: append([]rules.Chain{{Name: "KUBE-SMALL", Rules: accept}}, chains...),
		Jumps:  []rules.Jump{{Chain: "OUTPUT", Rule: rules.Rule{Spec: "-j KUBE-SMALL", Target: "KUBE-SMALL"}, Anchor: rules.Anchor{Position: rules.Top}}},
	}
}

func chainOf(name string, n int) rules.Chain {
	c := rules.Chain{Name: name}
	for range n {
		c.Rules = append(c.Rules, rules.Rule{Spec: "-j ACCEPT", Target: "ACCEPT"})
	}
	return c
}

// TestAChainThatIsLeftOutIsLearnedAtOnce: a chain grows and is left out. Its former rules are
// forgotten at once, even if they were most of the table. When it fits again, its rules are learned
// at once.
func TestAChainThatIsLeftOutIsLearnedAtOnce(t *testing.T) {
	large := rules.Chain{Name: "KUBE-LARGE", Rules: rules.LeftOut("KUBE-LARGE")}
	var l Learned
	for i, chain := range []rules.Chain{chainOf("KUBE-LARGE", 50), large, chainOf("KUBE-LARGE", 3)} {
		seen := leftOutSection(chain)
		next, due := l.Learn(rules.IPv4, rules.Nat, seen, canary.Finding{Verdict: canary.Changed}, noon)
		if !next.Generation[rules.IPv4.Table(rules.Nat)].Equal(seen) || !due.IsZero() {
			t.Errorf("read %d: learned %+v, due %s", i, next.Generation[rules.IPv4.Table(rules.Nat)], due)
		}
		l = next
	}
}

// TestALostChainThatWasLeftOutStaysInQuarantine: it stays there until it holds any rules again.
func TestALostChainThatWasLeftOutStaysInQuarantine(t *testing.T) {
	large := rules.Chain{Name: "KUBE-LARGE", Rules: rules.LeftOut("KUBE-LARGE")}
	jumps := rules.Jump{Chain: "PREROUTING", Rule: rules.LeftOut("PREROUTING")[0], Named: true}
	want := leftOutSection(large)
	want.Jumps = append(want.Jumps, jumps)
	list := []QuarantinedRule{{Chain: large.Name, Rule: large.Rules[0]}, {Chain: "PREROUTING", Rule: jumps.Rule}}
	q := Quarantine{}.With(rules.IPv4.Table(rules.Nat), list)
	into := rules.Jump{Chain: "PREROUTING", Rule: rules.Rule{Spec: "-j KUBE-SMALL", Target: "KUBE-SMALL"}}
	for name, tc := range map[string]struct {
		seen  rules.Section
		still []string
	}{
		"both are gone":              {leftOutSection(), []string{"KUBE-LARGE", "PREROUTING"}},
		"the chain stands empty":     {leftOutSection(chainOf("KUBE-LARGE", 0)), []string{"KUBE-LARGE", "PREROUTING"}},
		"it holds other rules":       {leftOutSection(chainOf("KUBE-LARGE", 2)), []string{"PREROUTING"}},
		"it is left out again":       {leftOutSection(large), []string{"PREROUTING"}},
		"the built-in one has jumps": {rules.Section{Chains: leftOutSection().Chains, Jumps: append(leftOutSection().Jumps, into)}, []string{"KUBE-LARGE"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := without(want, list); len(got.Chains) != 1 || len(got.Jumps) != 1 {
				t.Errorf("while it is in quarantine it ought to stand: %+v", got)
			}
			_, next := q.Supplement(rules.IPv4, rules.Nat, want, tc.seen, nil)
			var still []string
			for _, h := range next[rules.IPv4.Table(rules.Nat)] {
				still = append(still, h.Chain)
			}
			if diff := cmp.Diff(tc.still, still); diff != "" {
				t.Errorf("in quarantine (-want +got)\n%s", diff)
			}
		})
	}
}

// TestAQuarantineOutlivesTheNextTry: the first stage restores a table. Another process writes
// before the second stage, so all tables are read again. The first table needs no write then, and
// keeps its quarantine.
func TestAQuarantineOutlivesTheNextTry(t *testing.T) {
	n := dependent(t, iptables.NFT)
	opaque := rules.LeftOut("KUBE-LARGE")[0]
	filter := n.job.Generation[v4.Table(rules.Filter)]
	filter.Chains = append(slices.Clone(filter.Chains), rules.Chain{Name: "KUBE-LARGE", Rules: []rules.Rule{opaque}})
	n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), filter)
	n.job.Pace = Pace(time.Second)
	wrote := sync.OnceFunc(func() { must(t, n.Bypassing().RestoreNoflush(v4, "*filter\n:OTHERS - [0:0]\nCOMMIT\n")) })
	n.replayer.Kernel = &stager{recorder: recorder{Beginner: n.Fake}, between: wrote}
	must(t, n.Bypassing().RestoreNoflush(v4, "*filter\n:KUBE-LARGE - [0:0]\nCOMMIT\n")) // iptables -F leaves chains
	must(t, n.Flush(v4, rules.Filter, ""))
	must(t, n.Flush(v4, rules.Nat, ""))
	result := n.heal()
	got := result[v4].Tables[rules.Filter]
	if !got.Proved || len(got.Quarantined) != 1 || result[v4].Outcome != Partial {
		t.Errorf("proved %t, in quarantine %+v, %s; want the chain that is left out", got.Proved, got.Quarantined, result[v4].Outcome)
	}
	if !got.Replayed {
		t.Error("nobody takes over the quarantine of a table that is not called replayed")
	}
}
