package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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

// twins are matches that iptables-legacy 1.8.9 prints in the same words. The
// first never matches; the second matches as the words say.
var twins = []struct{ never, always string }{
	{"! -i +", ""},
	{"! -o +", ""},
	{"-p tcp -m tcp ! --sport :", "-p tcp -m tcp"},
	{"-p tcp -m tcp ! --dport 0:65535", "-p tcp -m tcp"},
	{"-p udp -m udp ! --sport :", "-p udp -m udp"},
	{"-p udp -m udp ! --dport 0:65535", "-p udp -m udp"},
	{"-p esp -m esp ! --espspi :", "-p esp -m esp"},
	{"-p ah -m ah ! --ahspi :", "-p ah -m ah"},
	{"-p ipcomp -m ipcomp ! --ipcompspi :", "-p ipcomp -m ipcomp"},
	{"-p mh -m mh ! --mh-type :", "-p mh -m mh"},
	{"-m rt ! --rt-segsleft :", "-m rt"},
	{"-m frag ! --fragid :", "-m frag"},
}

// Rules without a text come back byte for byte, each in its place, in a user's chain and in a
// built-in one. So do rules that iptables prints in another rule's words. While their ipsets exist,
// the numbers in these rules stay the same. Nothing else of the table changes, not even a count.
func TestOddRulesComeBackByteForByte(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		restore, inet := program(backend, family, "-restore"), map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		for _, set := range []string{"a -h", "a src -m comment --comment"} {
			nstest.Command(t, "ipset", "create", set, "hash:ip", "family", inet)
		}
		nstest.CommandInput(t, "*filter\n:INPUT ACCEPT [7:700]\n:FORWARD DROP [0:0]\n:GOAL - [0:0]\n:MINE - [0:0]\n:OTHER - [0:0]\n:ZZZ - [0:0]\n"+
			"[5:50] -A OTHER -p tcp -m tcp --dport 7 -j GOAL\n[3:30] -A OTHER -p udp -g ZZZ\n-A ZZZ -j DROP\n[1:10] -A INPUT -j OTHER\n-A INPUT -p icmp\nCOMMIT\n", restore, "--counters")
		taken := 0
		add := func(args []string) {
			if !addOdd(t, backend, family, "MINE", args) {
				return
			}
			addOdd(t, backend, family, "INPUT", args)
			iptablesCommand(t, backend, family, fmt.Sprintf("-A MINE -p tcp --dport %d -j ACCEPT", 1000+taken))
			taken++
		}
		for _, odd := range oddRules {
			add(odd.args)
		}
		add([]string{"-m", "comment", "--comment", "not UTF-8: \xff", "-j", "DROP"})
		var pieces, inMine []string
		for _, c := range twins {
			for _, to := range []string{"-j ACCEPT", "-j DROP", "-j RETURN", "-j GOAL", "-g ZZZ", ""} {
				odd := c.never + " " + to
				pieces = append(pieces, fmt.Sprintf("-A MINE %s\n-A MINE %s %s\n-A INPUT %s\n", odd, c.always, to, odd))
			}
		}
		refused := restoreEach(t, restore, rules.Filter, pieces)
		for _, i := range slices.Sorted(maps.Keys(refused)) { // INPUT takes no -o
			mine, _, _ := strings.Cut(pieces[i], "-A INPUT")
			inMine = append(inMine, mine)
		}
		taken += len(pieces) - len(restoreEach(t, restore, rules.Filter, inMine))

		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		saved := func() []string {
			return withoutCounters(nstest.Command(t, program(backend, family, "-save"), "-c", "-t", "filter"))
		}
		want, lines := mustRead(t, k, family).Tables, saved()
		bytes, textless := RuleBytes(t, backend, family, want), 0
		script := replayOf(rules.Filter, "MINE", want[rules.Filter].Rules("MINE"))
		for i, r := range want[rules.Filter].Rules("INPUT") {
			if reason, opaque := r.Opaque(); opaque {
				if !r.HasBytes() {
					t.Errorf("a rule has no bytes: %s", reason)
				}
				textless++
				script.Steps = append(script.Steps, Step{Verb: Insert, Chain: "INPUT", Index: i + 1, Rule: r})
			}
		}
		for range 2 {
			iptablesCommand(t, backend, family, "-F MINE")
			for _, step := range slices.Backward(script.Steps) {
				if step.Verb == Insert {
					iptablesCommand(t, backend, family, fmt.Sprintf("-D INPUT %d", step.Index))
				}
			}
			if w := restoreAll(t, k, family, script); w.Detour != nil {
				t.Errorf("not by bytes: %v", w.Detour)
			}
			if diff := cmp.Diff(bytes, RuleBytes(t, backend, family, want)); diff != "" {
				t.Fatalf("(-before +after):\n%s", diff)
			}
			for _, chain := range []string{"MINE", "INPUT"} {
				if diff := cmp.Diff(labels(want[rules.Filter].Rules(chain)), labels(mustRead(t, k, family).Tables[rules.Filter].Rules(chain))); diff != "" {
					t.Errorf("%s is read as (-want +got):\n%s", chain, diff)
				}
			}
			if diff := cmp.Diff(lines, saved()); diff != "" {
				t.Errorf("the table is another (-before +now):\n%s", diff)
			}
		}
		t.Logf("%d odd rules, %d of them in INPUT without a text", taken, textless)
		if taken < 30 || textless < 10 {
			t.Errorf("only %d odd rules are taken here, %d without a text", taken, textless)
		}
	})
}
