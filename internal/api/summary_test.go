package api

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSummary: tables of iptables and native ones are named, ten at most, and no command line.
// Where native tables lost rules, a table that lost only marks is not named.
func TestSummary(t *testing.T) {
	nat := TableLoss{Family: rules.IPv4, Table: rules.Nat, Kind: canary.Emptied, Rules: 1}
	native := NativeLoss{Family: "ip", Table: "ip kube-proxy", Kind: canary.TableDeleted}
	marks := TableLoss{Family: rules.IPv4, Table: rules.Filter, Kind: canary.TableDeleted}
	culprit := Culprit{PID: 3, Comm: "nft", Command: "nft flush ruleset"}
	for want, f := range map[string]Flush{
		"proved: ipv4 nat emptied; by unknown":                                 {Outcome: reload.Proved, Lost: Lost{Tables: []TableLoss{nat}}},
		"proved: ip kube-proxy table_deleted; by nft (pid 3)":                  {Outcome: reload.Proved, Native: []NativeLoss{native}, Culprits: []Culprit{culprit}},
		"proved: ipv4 filter table_deleted; by unknown":                        {Outcome: reload.Proved, Lost: Lost{Tables: []TableLoss{marks}}},
		"back, by its owner: ip kube-proxy table_deleted; by unknown":          {Outcome: reload.Skipped, Lost: Lost{Tables: []TableLoss{marks}}, Native: []NativeLoss{native}},
		"raced: ipv4 nat emptied, ip kube-proxy table_deleted; by nft (pid 3)": {Outcome: reload.Raced, Lost: Lost{Tables: []TableLoss{nat}}, Native: []NativeLoss{native}, Culprit: culprit},
		"failed: " + strings.Repeat("ipv4 nat emptied, ", 9) + "ipv4 nat emptied and 2 more; by unknown": {
			Outcome: reload.Failed, Lost: Lost{Tables: []TableLoss{nat, nat, nat, nat, nat, nat, nat, nat, nat, nat, nat}}, Native: []NativeLoss{native}},
	} {
		if got := f.Summary(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
