package rules_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTableWith: With must not change the table that it copies.
func TestTableWith(t *testing.T) {
	accept, drop := []rules.Rule{{Spec: "-j ACCEPT", Target: "ACCEPT"}}, []rules.Rule{{Spec: "-j DROP", Target: "DROP"}}
	chains := []rules.Chain{{Name: "INPUT", Policy: "ACCEPT"}, {Name: "A", Rules: accept}, {Name: "B", Rules: accept}}
	old := rules.NewTable(rules.Filter)
	old.Grow(len(chains))
	for _, c := range chains {
		old.Add(c)
	}
	changed := old.With(rules.Chain{Name: "B", Rules: drop}, rules.Chain{Name: "INPUT", Policy: "DROP"}, rules.Chain{Name: "C", Rules: drop})
	ignore := cmpopts.IgnoreUnexported(rules.Table{})
	if diff := cmp.Diff(&rules.Table{Name: rules.Filter, Chains: chains}, old, ignore); diff != "" {
		t.Errorf("the old table (-want +got):\n%s", diff)
	}
	want := []rules.Chain{{Name: "INPUT", Policy: "DROP"}, {Name: "A", Rules: accept}, {Name: "B", Rules: drop}}
	if diff := cmp.Diff(&rules.Table{Name: rules.Filter, Chains: want}, changed, ignore); diff != "" {
		t.Errorf("the new table (-want +got):\n%s", diff)
	}
	if got := changed.Chain("B"); got == nil || got.Rules[0] != drop[0] {
		t.Errorf("B is %v", got)
	}
}
