package daemon

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// wantCounts fails unless what a record says of its chains adds up to what it
// says of its tables, and that to what it says of all.
func wantCounts(t *testing.T, record api.Flush) {
	t.Helper()
	if record.ID == "" || record.Attempts < 1 {
		t.Errorf("flush %q after %d attempts", record.ID, record.Attempts)
	}
	var all api.Lost
	for _, table := range record.Lost.Tables {
		sum := api.TableLoss{Family: table.Family, Table: table.Table, Kind: table.Kind, PerChain: table.PerChain, By: table.By, Unprotected: table.Unprotected}
		for _, c := range table.PerChain {
			sum.Rules += c.Rules
			sum.Jumps += c.Jumps
			if c.Jumps == 0 {
				sum.Chains++
			}
		}
		if diff := cmp.Diff(sum, table); diff != "" {
			t.Errorf("%s %s: the chains do not add up (-chains +table):\n%s", table.Family, table.Table, diff)
		}
		all.Chains += table.Chains
		all.Rules += table.Rules
		all.Jumps += table.Jumps
	}
	if all.Chains != record.Lost.Chains || all.Rules != record.Lost.Rules || all.Jumps != record.Lost.Jumps {
		t.Errorf("the tables add up to %+v, the record says %+v", all, record.Lost)
	}
}

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

// TestRecordIsBounded: a flush of very many chains is counted in full, and the
// chains that lost most are named.
func TestRecordIsBounded(t *testing.T) {
	var record api.Flush
	for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		lost := lostChains(t, 150)
		lost.Jumps = []rules.Jump{{Chain: "OUTPUT"}, {Chain: "OUTPUT"}, {Chain: "OUTPUT"}}
		lost.Rules += len(lost.Jumps)
		addLoss(&record, rules.IPv4.Table(table), hit{verdict: canary.Emptied, lost: lost})
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

// TestOldRecordsHoldLess: what was published keeps its lists, and the journal has
// those of the newest records only.
func TestOldRecordsHoldLess(t *testing.T) {
	st := &state{}
	first := api.Flush{ID: "0"}
	addLoss(&first, rules.IPv4.Table(rules.Nat), hit{verdict: canary.Emptied, lost: lostChains(t, 3)})
	for range journalKept + 1 {
		st.remember(first)
	}
	if len(st.journal) != journalKept {
		t.Errorf("%d records, want %d", len(st.journal), journalKept)
	}
	for i, record := range st.journal {
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
