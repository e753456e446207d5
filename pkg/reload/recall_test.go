package reload

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRecall: purged rules return to their place, in any order. Rules that an owner removed, added
// or rewrote in between stay as the owner left them.
func TestRecall(t *testing.T) {
	id := v4.Table(rules.Filter)
	section := func(lines ...string) rules.Section {
		c := rules.Chain{Name: "KUBE-FORWARD"}
		for _, l := range lines {
			c.Rules = append(c.Rules, spec("-s 10.0.0."+l+"/32 -j DROP"))
		}
		return rules.Section{Chains: []rules.Chain{c}}
	}
	none := rules.Section{}
	for _, tt := range []struct {
		name   string
		states []rules.Section
		purged []bool // of each step
		shared bool
		want   rules.Section
	}{
		{"one rule", []rules.Section{section("1", "2", "3"), section("1", "3")}, []bool{true}, false, section("1", "2", "3")},
		{"all of a chain, and the chain", []rules.Section{section("1", "2", "3"), section("1", "3"), section("3"), none}, []bool{true, true, true}, false, section("1", "2", "3")},
		{"an owner removed it", []rules.Section{section("1", "2", "3"), section("1", "3")}, []bool{false}, false, section("1", "3")},
		{"an owner removed one before", []rules.Section{section("1", "2", "3"), section("1", "3"), section("3")}, []bool{false, true}, false, section("1", "3")},
		{"an owner wrote the chain again", []rules.Section{section("1", "2", "3"), section("1", "3"), section("7", "8")}, []bool{true, false}, false, section("7", "8")},
		{"owners share the chain", []rules.Section{section("1", "2", "3"), section("1", "3"), section("1", "3", "4")}, []bool{true, false}, true, section("1", "2", "3", "4")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var list []Removal
			var purged []bool
			for i := range tt.purged {
				r := RemovalOf(id, tt.states[i], tt.states[i+1], time.Now())
				if !r.Empty() {
					list, purged = append([]Removal{r}, list...), append([]bool{tt.purged[i]}, purged...)
				}
			}
			learned := Learned{Generation: rules.Generation{}.With(id, tt.states[len(tt.states)-1])}
			next, recalled := learned.Recall(list, func(i int, _ string) bool { return purged[i] }, func(string) bool { return tt.shared })
			if d := cmp.Diff(tt.want.Chains, next.Generation[id].Chains, cmp.Comparer(func(a, b rules.Rule) bool { return a.Equal(b) })); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if changed := !next.Generation[id].Equal(learned.Generation[id]); changed != recalled.Has("KUBE-FORWARD", "") {
				t.Errorf("it changed: %t, recalled: %v", changed, recalled)
			}
		})
	}
}
