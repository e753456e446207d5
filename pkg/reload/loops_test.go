package reload

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// chainsOf reads chains: "A: B C" has chain A with jumps to B and C.
func chainsOf(t *testing.T, text string) (list []rules.Chain) {
	t.Helper()
	for line := range strings.Lines(text) {
		name, jumps, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok {
			continue
		}
		c := rules.Chain{Name: name}
		for _, to := range strings.Fields(jumps) {
			rule, err := rules.ParseRule("-j " + to)
			if err != nil {
				t.Fatal(err)
			}
			c.Rules = append(c.Rules, rule)
		}
		list = append(list, c)
	}
	return list
}

// row returns n chains, each with a jump to the next one, and the last one to end.
func row(name string, n int, end string) string {
	var text strings.Builder
	for i := range n {
		to := fmt.Sprintf("%s%d", name, i+1)
		if i+1 == n {
			to = end
		}
		fmt.Fprintf(&text, "%s%d: %s\n", name, i, to)
	}
	return text.String()
}

// TestTangles: the kernel refuses some jumps together. loopsAndDeepNests finds the planned jump
// that completes a loop or too deep a nest. It never blames a jump in a chain of others, or a good
// jump.
func TestTangles(t *testing.T) {
	for _, test := range []struct {
		name, stands, planned string
		deep                  bool
		want                  reasons
	}{
		{name: "nothing odd", stands: "OUTPUT: A\nA:\nB:", planned: "A: B C\nB: C\nC:"},
		{name: "a loop of planned jumps", stands: "OUTPUT: A", planned: "A: B\nB: C\nC: A", want: reasons{"-j A": "loop"}},
		{name: "a loop that nothing leads to", stands: "OUTPUT:", planned: "A: B\nB: A", want: reasons{"-j A": "loop"}},
		{name: "a chain that jumps to itself", stands: "OUTPUT: A", planned: "A: A ACCEPT", want: reasons{"-j A": "loop"}},
		{name: "a loop through a chain of others", stands: "OUTPUT: A\nX: A\nA:", planned: "A: B X\nB:", want: reasons{"-j X": "loop"}},
		{name: "as deep as may be", stands: "OUTPUT: A0", planned: row("A", 15, "ACCEPT"), deep: true},
		{name: "too deep", stands: "OUTPUT: A0", planned: row("A", 17, "ACCEPT"), deep: true, want: reasons{"-j A15": "more than 15"}},
		{name: "too deep, on x_tables", stands: "OUTPUT: A0", planned: row("A", 40, "ACCEPT")},
		{name: "too deep, but not from a built-in chain", stands: "OUTPUT:", planned: row("A", 40, "ACCEPT"), deep: true},
		{
			name: "others lead to it", stands: "OUTPUT: X0\nA0:\n" + row("X", 6, "A0"), planned: row("A", 12, "ACCEPT"), deep: true,
			want: reasons{"-j A9": "more than 15"},
		},
		{
			name: "too deep in chains of others behind it", stands: "OUTPUT: A0\n" + row("X", 14, "ACCEPT"), planned: "A0: A1 B\nA1: X0\nB:", deep: true,
			want: reasons{"-j X0": "more than 15"},
		},
		{
			name: "shallow first, deep later", stands: "OUTPUT: B A0", planned: "B: C0\n" + row("A", 10, "C0") + row("C", 8, "ACCEPT"), deep: true,
			want: reasons{"-j C5": "more than 15"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			plan := tablePlan{table: rules.Nat, seen: &rules.Table{Name: rules.Nat, Chains: chainsOf(t, test.stands)}, wrote: chainsOf(t, test.planned)}
			got := loopsAndDeepNests(plan, test.deep)
			for spec, reason := range got {
				if words := test.want[spec]; words != "" && strings.Contains(reason, words) {
					got[spec] = words
				}
			}
			if len(got)+len(test.want) > 0 {
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

// TestTanglesOfManyWays: each chain has two ways to the next one, so there are a million ways
// through. The walk takes each chain at most once for each depth, and ends.
func TestTanglesOfManyWays(t *testing.T) {
	var text strings.Builder
	for i := range 40 {
		fmt.Fprintf(&text, "A%d: A%d B%d\nB%d: A%d\n", i, i+1, i, i, i+1)
	}
	plan := tablePlan{table: rules.Nat, seen: &rules.Table{Name: rules.Nat, Chains: chainsOf(t, "OUTPUT: A0")}, wrote: chainsOf(t, text.String()+"A40:\n")}
	if got := loopsAndDeepNests(plan, false); len(got) != 0 {
		t.Errorf("got %v, want nothing", got)
	}
	if got := loopsAndDeepNests(plan, true); len(got) == 0 {
		t.Error("nothing is too deep")
	}
}

// TestTanglesOfATableThatIsGone: a flush may have deleted the table itself.
func TestTanglesOfATableThatIsGone(t *testing.T) {
	plan := tablePlan{table: rules.Nat, jumps: []rules.Jump{{Chain: "OUTPUT", Rule: spec("-j KUBE-A")}}}
	if bad := loopsAndDeepNests(plan, true); len(bad) > 0 {
		t.Errorf("found %v", bad)
	}
}
