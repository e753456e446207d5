package accepted

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// chainOf returns a section with one chain of n rules, and the jump to it.
func chainOf(n int) rules.Section {
	c := rules.Chain{Name: "KUBE-SERVICES"}
	for i := range n {
		c.Rules = append(c.Rules, rules.Rule{Spec: fmt.Sprintf("-d 10.0.0.%d -j RETURN", i), Target: "RETURN"})
	}
	return rules.Section{Chains: []rules.Chain{c}, Jumps: []rules.Jump{{Chain: "PREROUTING", Rule: rules.Rule{Spec: "-j KUBE-SERVICES", Target: "KUBE-SERVICES"}}}}
}

// TestLossesInSteps: most of a table is removed in steps. That is reported as one removal,
// unless the steps are far apart or rules return meanwhile.
func TestLossesInSteps(t *testing.T) {
	id, start := rules.IPv4.Table(rules.Nat), time.Unix(1e9, 0)
	for name, test := range map[string]struct {
		left  []int // rules after each step, of 4 times muchOfTable
		apart time.Duration
		said  int // the number of removed rules in the report; 0: no report
		steps bool
	}{
		"at once":          {[]int{muchOfTable}, time.Second, 3 * muchOfTable, false},
		"in steps":         {[]int{3 * muchOfTable, 2 * muchOfTable, muchOfTable}, time.Second, 3 * muchOfTable, true},
		"far apart":        {[]int{3 * muchOfTable, 2*muchOfTable - 1}, 2 * shrinksOn, 0, false},
		"a little":         {[]int{4*muchOfTable - 1}, time.Second, 0, false},
		"and it came back": {[]int{3 * muchOfTable, 4 * muchOfTable, 3 * muchOfTable}, time.Second, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			var l List
			before, now := chainOf(4*muchOfTable), start
			for _, left := range test.left {
				now = now.Add(test.apart)
				after := chainOf(left)
				l.Learn(id, before, after, culprit.Read{At: now}, reload.Learned{}, now)
				before = after
			}
			said, steps := 0, false
			for _, x := range l.Due(now) {
				said, steps = said+x.Rules, steps || x.Steps
			}
			if diff := cmp.Diff(test.said, said); diff != "" || steps != test.steps {
				t.Errorf("in steps: %t, want %t; rules that are said to be gone (-want +got):\n%s", steps, test.steps, diff)
			}
		})
	}
}
