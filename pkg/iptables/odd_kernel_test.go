package iptables

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// oddRules are rules that iptables accepts and prints, but whose printed text it
// would not read back. Each has its arguments and its target.
var oddRules = []struct {
	args   []string
	target string
}{
	{[]string{"-m", "comment", "--comment", "x\ny", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "comment", "--comment", "x\nCOMMIT\n*nat\n-A OTHER -j DROP", "-j", "GOAL"}, "GOAL"},
	{[]string{"-i", "a -h", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-o", "a -M /x", "-j", "GOAL"}, "GOAL"},
	{[]string{"-i", "+ -j ACCEPT\n#", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-i", "a\n-A OTHER", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-i", "a\n", "-j", "RETURN"}, "RETURN"},
	{[]string{"-i", `a"`, "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-i", `b"`, "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "recent", "--rcheck", "--name", "a --rttl", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "recent", "--rcheck", "--name", "a\n-A OTHER -j DROP\n-A MINE", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "hashlimit", "--hashlimit-upto", "3/sec", "--hashlimit-name", "a -h", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "string", "--string", `a\b`, "--algo", "bm", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "set", "--match-set", "a -h", "src", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "set", "--match-set", "a src -m comment --comment", "src", "-j", "ACCEPT"}, "ACCEPT"},
	{[]string{"-m", "physdev", "--physdev-in", "a -h", "-j", "ACCEPT"}, "ACCEPT"},
	{slices.Concat(slices.Repeat([]string{"-m", "comment", "--comment", strings.Repeat(`"`, 255)}, 140), []string{"-j", "ACCEPT"}), "ACCEPT"},
}

// addOdd adds an odd rule, and reports whether this machine accepts it.
func addOdd(t *testing.T, backend Backend, family rules.Family, chain string, args []string) bool {
	t.Helper()
	_, err := tryTool(t, "", program(backend, family, ""), append([]string{"-w", "5", "-A", chain}, args...)...)
	return err == nil
}

// An odd rule loses only its own text. No other rule of its chain or another may
// lose its text: in a read next to it, under the lock, or afterwards.
func TestAnOddRuleCostsItself(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		for _, set := range []string{"a -h", "a src -m comment --comment"} {
			nstest.Command(t, "ipset", "create", set, "hash:ip", "family", inet)
		}
		for _, line := range []string{"-N MINE", "-N OTHER", "-N GOAL", "-A GOAL -p tcp -j RETURN", "-t nat -N OTHER", "-t nat -A OTHER -p udp -j RETURN"} {
			iptablesCommand(t, backend, family, line)
		}
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		var standing []int // indexes of oddRules
		for n, odd := range oddRules {
			if !addOdd(t, backend, family, "MINE", odd.args) {
				t.Logf("not taken here: %.60q", odd.args)
				continue
			}
			standing = append(standing, n)
			iptablesCommand(t, backend, family, fmt.Sprintf("-A MINE -p tcp --dport %d -j ACCEPT", n+1))
			iptablesCommand(t, backend, family, fmt.Sprintf("-A OTHER -p tcp --dport %d -j MINE", n+1))
			wantOdd(t, mustRead(t, k, family), backend, standing, "beside the lock")
		}
		if len(standing) < len(oddRules)-2 {
			t.Errorf("only %d of %d rules were taken", len(standing), len(oddRules))
		}
		for _, moment := range []string{"under the lock", "again under the lock"} {
			session := begin(t, k)
			wantOdd(t, mustRead(t, session, family), backend, standing, moment)
			if err := session.Close(); err != nil {
				t.Fatal(err)
			}
		}
		wantOdd(t, mustRead(t, k, family), backend, standing, "at last")
	})
}

// wantOdd checks the chains that TestAnOddRuleCostsItself fills.
func wantOdd(t *testing.T, got Snapshot, backend Backend, standing []int, moment string) {
	t.Helper()
	filter := got.Tables[rules.Filter]
	if filter == nil || len(got.Unreadable) > 0 {
		t.Fatalf("%s: tables %v, unreadable %v", moment, got.Tables, got.Unreadable)
	}
	mine, other := filter.Chain("MINE").Rules, filter.Chain("OTHER").Rules
	if len(mine) != 2*len(standing) || len(other) != len(standing) {
		t.Fatalf("%s: MINE has %d rules, OTHER %d, of %d and %d", moment, len(mine), len(other), 2*len(standing), len(standing))
	}
	for i, n := range standing {
		odd := oddRules[n]
		_, opaque := mine[2*i].Opaque()
		if !opaque || mine[2*i].Target != odd.target || !mine[2*i].HasBytes() {
			t.Errorf("%s: %.60q is %.200q to %q", moment, odd.args, mine[2*i].Spec, mine[2*i].Target)
		}
		port := fmt.Sprintf("-p tcp -m tcp --dport %d -j ", n+1)
		if mine[2*i+1].Spec != port+"ACCEPT" || other[i].Spec != port+"MINE" {
			t.Errorf("%s: beside %.60q stand %.200q and %.200q", moment, odd.args, mine[2*i+1].Spec, other[i].Spec)
		}
	}
	if goal := filter.Chain("GOAL").Rules; len(goal) != 1 || goal[0].Spec != "-p tcp -j RETURN" {
		t.Errorf("%s: GOAL is %v", moment, goal)
	}
	if nat := got.Tables[rules.Nat].Chain("OTHER").Rules; len(nat) != 1 || nat[0].Spec != "-p udp -j RETURN" {
		t.Errorf("%s: OTHER of nat is %v", moment, nat)
	}
}
