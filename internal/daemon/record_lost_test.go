package daemon

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
)

// wantCounts fails unless a record's counts of chains add up to its counts of
// tables, and these to the total.
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
