package iptables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

func TestScriptIsInputOfIptablesRestore(t *testing.T) {
	script := Script{
		Table:   rules.Nat,
		Declare: []string{"KUBE-A", "KUBE-C", "KUBE-B"},
		Steps: []Step{
			{Verb: Delete, Chain: "OUTPUT", Rule: rules.Rule{Spec: "-j KUBE-A", Target: "KUBE-A"}},
			{Verb: Append, Chain: "KUBE-A", Rule: rules.Rule{Spec: "-s 10.0.0.1/32 -j KUBE-B", Target: "KUBE-B"}},
			{Verb: Append, Chain: "KUBE-B"}, // a rule that only counts
			{Verb: Insert, Chain: "OUTPUT", Rule: rules.Rule{Spec: "-j KUBE-A", Target: "KUBE-A"}},
			{Verb: Insert, Chain: "OUTPUT", Index: 3, Rule: rules.Rule{Spec: "-j KUBE-B", Target: "KUBE-B"}},
			{Verb: Delete, Chain: "OUTPUT", Index: 4},
			{Verb: Flush, Chain: "KUBE-C"},
			{Verb: Drop, Chain: "KUBE-C"},
		},
	}
	want := `*nat
:KUBE-C - [0:0]
:KUBE-B - [0:0]
:KUBE-A - [0:0]
-D OUTPUT -j KUBE-A
-A KUBE-A -s 10.0.0.1/32 -j KUBE-B
-A KUBE-B
-I OUTPUT -j KUBE-A
-I OUTPUT 3 -j KUBE-B
-D OUTPUT 4
-F KUBE-C
-X KUBE-C
COMMIT
`
	var text strings.Builder
	n, err := script.WriteTo(&text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, text.String()); diff != "" {
		t.Errorf("WriteTo: (-want +got)\n%s", diff)
	}
	if n != int64(len(want)) {
		t.Errorf("WriteTo wrote %d bytes by its own count, and %d in truth", n, len(want))
	}
	if diff := cmp.Diff([]string{"KUBE-A", "KUBE-C", "KUBE-B"}, script.Declare); diff != "" {
		t.Errorf("WriteTo changed the script: (-want +got)\n%s", diff)
	}
}
