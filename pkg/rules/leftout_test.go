package rules_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

const largeSave = `*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-LARGE - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -d 10.0.0.1/32 -j KUBE-LARGE
-A OUTPUT -j KUBE-SERVICES
-A KUBE-LARGE -s 10.0.0.1/32 -j RETURN
-A KUBE-LARGE -s 10.0.0.2/32 -j RETURN
-A KUBE-SERVICES -j KUBE-LARGE
-A KUBE-SERVICES -j ACCEPT
COMMIT
`

// leaving returns largeSave's table without the rules of some chains.
func leaving(t *testing.T, out ...string) *rules.Table {
	t.Helper()
	set := savefile.Tables(t, largeSave)
	for _, name := range out {
		set[rules.Nat].Chain(name).Rules = rules.LeftOut(name)
	}
	return set[rules.Nat]
}

// TestAChainThatIsLeftOutIsKnownByName: a protected chain that is left out is part of the
// generation by its name. Jumps depend on it, it counts no rules, and the rendered text neither
// declares nor fills it.
func TestAChainThatIsLeftOutIsKnownByName(t *testing.T) {
	protects := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
	s := rules.Protection{Chain: protects}.Extract(leaving(t, "KUBE-LARGE"), func(rules.Rule) bool { return false })
	if c, ok := s.Chain("KUBE-LARGE"); !ok || !c.LeftOut() {
		t.Errorf("the chain that is left out is %+v", c)
	}
	if diff := cmp.Diff([]string{"KUBE-LARGE"}, s.DependsOn); diff != "" {
		t.Errorf("chains that rules depend on (-want +got)\n%s", diff)
	}
	if got := s.RuleCount(); got != 5 {
		t.Errorf("it counts %d rules, want 5: two in KUBE-SERVICES and three jumps", got)
	}
	if found := s.Opaque(rules.Section{}, nil); found != nil {
		t.Errorf("called rules without a text: %v", found)
	}
	text := rules.Render(rules.Generation{rules.IPv4.Table(rules.Nat): s}, rules.IPv4)
	for _, line := range strings.Split(text, "\n") {
		if strings.Contains(line, "KUBE-LARGE") && !strings.HasPrefix(line, "#") {
			t.Errorf("rendered: %q", line)
		}
	}
	_, rest := s.Split(func(chain string) bool { return chain == "KUBE-SERVICES" })
	if joined := (rules.Section{}).Join(rest); len(joined.DependsOn) != 1 {
		t.Errorf("after a join rules depend on %v", joined.DependsOn)
	}
}

// TestJumpsOfABuiltInChainThatIsLeftOutAreNotKnown: if a built-in chain is left out, its jumps
// are unknown. A single jump replaces them, and the chain gets no mark.
func TestJumpsOfABuiltInChainThatIsLeftOutAreNotKnown(t *testing.T) {
	s := rules.Protection{Chain: func(chain string) bool { return chain == "KUBE-SERVICES" }}.Extract(leaving(t, "OUTPUT"), func(rules.Rule) bool { return false })
	var jumps []string
	for _, h := range s.Jumps {
		if h.LeftOut() {
			jumps = append(jumps, h.Chain+" left out")
			continue
		}
		jumps = append(jumps, h.String())
	}
	if diff := cmp.Diff([]string{"-A PREROUTING -j KUBE-SERVICES", "OUTPUT left out"}, jumps); diff != "" {
		t.Errorf("jumps (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff([]string{"PREROUTING"}, s.WitnessedChains(rules.Nat)); diff != "" {
		t.Errorf("chains with a witness (-want +got)\n%s", diff)
	}
}
