package flushes

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lostChains are n chains with 1 rule, 2 rules and so on.
func lostChains(t *testing.T, n int) reload.Lost {
	t.Helper()
	rule := rules.Rule{Spec: "-j RETURN", Target: "RETURN"}
	var lost reload.Lost
	for i := 1; i <= n; i++ {
		c := reload.LostChain{Name: fmt.Sprintf("KUBE-SVC-%d", i)}
		for range i {
			c.Was = append(c.Was, rule)
		}
		lost.Chains = append(lost.Chains, c)
		lost.Rules += i
	}
	return lost
}

// TestRecordIsBounded: a flush of very many chains is counted in full, and the chains with the
// largest losses are named.
func TestRecordIsBounded(t *testing.T) {
	var record api.Flush
	for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		lost := lostChains(t, 150)
		lost.Jumps = []rules.Jump{{Chain: "OUTPUT"}, {Chain: "OUTPUT"}, {Chain: "OUTPUT"}}
		lost.Rules += len(lost.Jumps)
		AddLoss(&record, rules.IPv4.Table(table), Hit{Verdict: canary.Emptied, Lost: lost})
	}
	if diff := cmp.Diff([]int{450, 3 * 11328, 9}, []int{record.Lost.Chains, record.Lost.Rules, record.Lost.Jumps}); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var shown, left []int
	for _, table := range record.Lost.Tables {
		shown, left = append(shown, len(table.PerChain)), append(left, table.More)
	}
	if diff := cmp.Diff([][]int{{100, 100, 0}, {51, 51, 151}}, [][]int{shown, left}); diff != "" {
		t.Errorf("chains that are listed, and that are not (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(api.ChainLoss{Chain: "KUBE-SVC-150", Rules: 150}, record.Lost.Tables[0].PerChain[0]); diff != "" {
		t.Errorf("the worst comes first (-want +got):\n%s", diff)
	}
}

// TestOldRecordsHoldLess: a published record keeps its lists, and the journal has only the
// lists of the newest records.
func TestOldRecordsHoldLess(t *testing.T) {
	var list History
	first := api.Flush{ID: "0"}
	AddLoss(&first, rules.IPv4.Table(rules.Nat), Hit{Verdict: canary.Emptied, Lost: lostChains(t, 3)})
	for range Kept + 1 {
		list.Remember(first)
	}
	if len(list) != Kept {
		t.Errorf("%d records, want %d", len(list), Kept)
	}
	for i, record := range list {
		want := 3
		if i >= recordsListed {
			want = 0
		}
		table := record.Lost.Tables[0]
		if len(table.PerChain) != want || len(table.PerChain)+table.More != 3 || table.Rules != 6 {
			t.Errorf("record %d has %+v, want %d chains listed", i, table, want)
		}
	}
	if len(first.Lost.Tables[0].PerChain) != 3 {
		t.Error("the record that was handed out lost its chains")
	}
}
