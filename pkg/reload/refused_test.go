package reload

import (
	"slices"
	"testing"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// declaredText is an operator's firewall in three tables.
const declaredText = `*mangle
:KUBE-M - [0:0]
-A KUBE-M -j RETURN
-A FORWARD -j KUBE-M
COMMIT
*nat
:KUBE-N - [0:0]
-A KUBE-N -j RETURN
-A PREROUTING -j KUBE-N
COMMIT
*filter
:KUBE-F - [0:0]
-A KUBE-F -j RETURN
-A FORWARD -j KUBE-F
COMMIT
`

// withBad returns the generation with another rule in a chain of nat.
func withBad(g rules.Generation, r rules.Rule) rules.Generation {
	s := g[v4.Table(rules.Nat)]
	s.Chains = slices.Clone(s.Chains)
	i := slices.IndexFunc(s.Chains, func(c rules.Chain) bool { return c.Name == "KUBE-N" })
	s.Chains[i].Rules = append(slices.Clone(s.Chains[i].Rules), r)
	return g.With(v4.Table(rules.Nat), s)
}

// TestARefusedRuleKeepsItsTableOnly: a table with a refused claimed rule stays as it is, and the
// others are written. The result names the rule. The next try tries it first, and names it again.
func TestARefusedRuleKeepsItsTableOnly(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			n := newNode(t, backend, declaredText, v4)
			bad := rule("-j NOSUCH")
			n.job.Claimed, n.job.Strict = protects, true
			for _, table := range protect.Always() {
				s := n.job.Generation[v4.Table(table)]
				s.Chains = append(slices.Clone(s.Chains), rules.Chain{Name: "KUBE-NEW", Rules: ruleList("-j RETURN")})
				n.job.Generation = n.job.Generation.With(v4.Table(table), s)
			}
			good := n.job.Generation
			n.job.Generation = withBad(good, bad)
			for try := range 2 {
				before := n.Restores()
				result := n.heal()
				n.outcome(result, v4, []Outcome{Partial, Failed}[try])
				n.job.Refused = n.job.Refused.After(result)
				list := n.job.Refused[v4.Table(rules.Nat)]
				if len(list) != 1 || list[0].Chain != "KUBE-N" || list[0].Rule != bad || list[0].Class != iptables.ReasonMissingChain || n.job.Refused.Count() != 1 {
					t.Fatalf("try %d: refused %+v", try, n.job.Refused)
				}
				for table, there := range map[rules.TableName]bool{rules.Mangle: true, rules.Filter: true, rules.Nat: false} {
					snapshot, err := n.Fake.Read(t.Context(), v4)
					must(t, err)
					if got := snapshot.Tables[table].Chain("KUBE-NEW") != nil; got != there {
						t.Errorf("try %d: the new chain is in %s: %t", try, table, got)
					}
				}
				// The restores are: one as a whole, an empty one, the suspect, and the removal of
				// the trial's chains.
				if tried := n.Restores() - before; try == 1 && tried != 4 {
					t.Errorf("a try that fails took %d restores, want 4", tried)
				}
			}
			n.job.Generation = good
			result := n.heal()
			n.outcome(result, v4, Proved)
			if refused := n.job.Refused.After(result); refused.Count() != 0 {
				t.Errorf("still refused: %+v", refused)
			}
		})
	}
}

// TestTrial: the kernel tries each rule, and nothing is left behind.
func TestTrial(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		refused, err := n.replayer.Try(t.Context(), n.job.Generation, v4, v6)
		must(t, err)
		if refused.Count() != 0 {
			t.Errorf("refused: %+v", refused)
		}
		s := rules.Section{Chains: []rules.Chain{{Name: "SITE", Rules: ruleList("-j RETURN", "-j NOSUCH", "-j LATER", "-j corp")}, {Name: "LATER"}}}
		refused, err = n.replayer.Try(t.Context(), rules.Generation{v4.Table(rules.Filter): s}, v4, v6)
		must(t, err)
		if list := refused[v4.Table(rules.Filter)]; refused.Count() != 1 || len(list) != 1 || list[0].Rule.Target != "NOSUCH" {
			t.Errorf("refused: %+v", refused)
		}
		n.same(v4)
		n.same(v6)
	})
}
