package main

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestVerdictLine: every result is one line of at most 80 bytes.
func TestVerdictLine(t *testing.T) {
	intact := verdicts(canary.Intact, canary.Intact, canary.Changed)
	longest := verdicts(canary.JumpsMissing, canary.TableDeleted, canary.ChainDeleted)
	for want, families := range map[string]map[rules.Family]api.Verdicts{
		"intact: 6 tables":             {rules.IPv4: intact, rules.IPv6: intact},
		"intact: 3 tables":             {rules.IPv6: intact},
		"intact: 0 tables":             {},
		"unknown: ipv4 nat, ipv6 nat":  {rules.IPv4: verdicts(canary.Intact, canary.Unknown, canary.Intact), rules.IPv6: verdicts(canary.Intact, "", canary.Intact)},
		"lost: ipv6 filter emptied":    {rules.IPv4: verdicts(canary.Unknown, canary.Intact, canary.Intact), rules.IPv6: verdicts(canary.Intact, canary.Intact, canary.Emptied)},
		"lost: ipv4 nat partial":       {rules.IPv4: verdicts(canary.Intact, canary.Partial, canary.Intact), rules.IPv6: verdicts(canary.Intact, canary.Intact, canary.Refused)},
		"lost: ipv4 nat chain_deleted": {rules.IPv4: verdicts(canary.Intact, canary.ChainDeleted, canary.Intact)},
		"lost: ipv4 mangle jumps_missing, ipv4 nat table_deleted and 4 more": {rules.IPv4: longest, rules.IPv6: longest},
		"lost: ipv4 mangle emptied, ipv4 nat emptied, ipv4 filter emptied and 3 more": {
			rules.IPv4: verdicts(canary.Emptied, canary.Emptied, canary.Emptied), rules.IPv6: verdicts(canary.Emptied, canary.Emptied, canary.Emptied),
		},
	} {
		got := lineOf(api.Status{Families: families})
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		if len(got) > lineWidth {
			t.Errorf("%q has %d bytes, want at most %d", got, len(got), lineWidth)
		}
	}
}

// TestVerdictLineInAPause: the line names the pause, and as many tables as fit.
func TestVerdictLineInAPause(t *testing.T) {
	lost := verdicts(canary.Intact, canary.Emptied, canary.TableDeleted)
	for want, families := range map[string]map[rules.Family]api.Verdicts{
		"paused; intact: 3 tables":                                             {rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)},
		"paused; unknown: ipv4 nat":                                            {rules.IPv4: verdicts(canary.Intact, canary.Unknown, canary.Intact)},
		"paused; lost: ipv4 nat emptied, ipv4 filter table_deleted":            {rules.IPv4: lost},
		"paused; lost: ipv4 nat emptied, ipv4 filter table_deleted and 2 more": {rules.IPv4: lost, rules.IPv6: lost},
	} {
		if got := lineOf(api.Status{Families: families, Paused: true}); got != want || len(got) > lineWidth {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestVerdictLineWithAWarning: the line has the warning about rules in force, as far as there
// is room.
func TestVerdictLineWithAWarning(t *testing.T) {
	intact := map[rules.Family]api.Verdicts{rules.IPv4: verdicts(canary.Intact, canary.Intact, canary.Intact)}
	opaque := []api.Quarantined{{Family: rules.IPv4, Table: rules.Nat, Chain: "PREROUTING"}}
	for want, s := range map[string]api.Status{
		"intact: 3 tables, but one rule could not be put back if it were lost": {Families: intact, Opaque: opaque},
		"intact: 3 tables, but see canaryd status":                             {Families: intact, Opaque: opaque, RulesWithoutOwner: &api.OwnerlessRules{}},
	} {
		if got := lineOf(s); got != want || len(got) > lineWidth {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestErrorLine(t *testing.T) {
	if got := errorLine(errors.New("first\nsecond")); got != "unknown: first second" {
		t.Errorf("got %q", got)
	}
	for n := range 120 {
		got := errorLine(errors.New(strings.Repeat("x", n) + strings.Repeat("é", 40)))
		if len(got) > lineWidth || !utf8.ValidString(got) {
			t.Fatalf("%q has %d bytes, want at most %d and no half letters", got, len(got), lineWidth)
		}
	}
}
