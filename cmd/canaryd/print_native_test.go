package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
)

// TestWitnessText: status reports once for each family that its witness is missing, or that it
// has another name than in the documents.
func TestWitnessText(t *testing.T) {
	table := func(family, name, witness string, verdict canary.Verdict) api.NativeTable {
		return api.NativeTable{Family: family, Table: family + " " + name, Witness: witness, Verdict: verdict}
	}
	got := witnessText([]api.NativeTable{
		table("bridge", "unread", "", canary.Unknown),
		table("inet", "fw", "canaryd-witness-5f1e0c6a", canary.Intact),
		table("inet", "netavark", "canaryd-witness-5f1e0c6a", canary.Intact),
		table("ip", "kube-proxy", "canaryd-witness", canary.Intact),
		table("ip6", "kube-proxy", "", canary.Intact),
	})
	want := `the witness of family inet is table canaryd-witness-5f1e0c6a: another process has the name canaryd-witness
family ip6 has no witness: canaryd may take a flush of the ruleset for the owner's doing
`
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
