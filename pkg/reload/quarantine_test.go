package reload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// leaningText has rules that depend on ipsets and on an nfacct object.
const leaningText = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m set --match-set bad src -j KUBE-FORWARD
-A FORWARD -j KUBE-FORWARD
-A KUBE-FIREWALL -m conntrack --ctstate INVALID -m nfacct --nfacct-name dropped -j DROP
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
-A KUBE-FORWARD -m set --match-set friends dst -j ACCEPT
-A KUBE-FORWARD -m set --match-set bad src -j DROP
-A KUBE-FORWARD -j RETURN
COMMIT
`

var (
	setBad     = iptables.Set{Name: "bad", Create: "hash:ip family inet", Members: []string{"192.0.2.66"}}
	setMembers = iptables.Set{Name: "members", Create: "hash:ip family inet", Members: []string{"10.0.0.1"}}
	setFriends = iptables.Set{Name: "friends", Create: "list:set size 8", Members: []string{"members"}}
)

// dependent returns a node with rules that depend on sets, which were captured.
func dependent(t *testing.T, backend iptables.Backend) *testNode {
	t.Helper()
	return dependentOn(t, backend, leaningText)
}

// dependentOn is dependent with these rules.
func dependentOn(t *testing.T, backend iptables.Backend, text string) *testNode {
	t.Helper()
	n := &testNode{Fake: iptablestest.NewFake(backend, v4), t: t, before: map[rules.Family]string{}}
	for _, s := range []iptables.Set{setBad, setFriends, setMembers} {
		n.Sets().Put(s)
	}
	must(t, n.Sets().Account(t.Context(), "dropped"))
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: protects}, Supplier: n.Sets()}
	n.job = Job{Families: []rules.Family{v4}, Generation: rules.Generation{}, Sets: map[string]iptables.Set{}}
	must(t, n.RestoreNoflush(v4, text))
	snapshot, err := n.Fake.Read(t.Context(), v4)
	must(t, err)
	for table, seen := range snapshot.Tables {
		n.job.Generation = n.job.Generation.With(v4.Table(table), rules.Protection{Chain: protects}.Extract(seen, canary.IsMark))
	}
	n.job.Sets, err = n.Sets().Save(t.Context(), []string{"bad", "friends", "members"})
	must(t, err)
	n.before[v4] = n.content(v4)
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	return n
}

// takeHeld takes over the quarantine of a result, and the replay's Meant.
func (n *testNode) takeHeld(result Result) {
	for f, fr := range result {
		for table, tr := range fr.Tables {
			if (tr.Proved || tr.Landed) && tr.Replayed {
				n.job.Quarantine = n.job.Quarantine.With(f.Table(table), tr.Quarantined)
				n.job.Generation = Learned{Generation: n.job.Generation}.Mean(f.Table(table), tr.Meant, tr.Quarantined).Generation
			}
		}
	}
}

// look reads and learns the table filter, with its quarantined rules.
func (n *testNode) look() {
	n.t.Helper()
	id := v4.Table(rules.Filter)
	seen, quarantine := n.job.Quarantine.Supplement(v4, rules.Filter, n.job.Generation[id], n.filter(), n.replayer.Protection.Piecewise)
	n.job.Generation, n.job.Quarantine = n.job.Generation.With(id, seen), quarantine
}

// held returns the quarantined rules of the table filter.
func (n *testNode) held() []string {
	var list []string
	for _, h := range n.job.Quarantine[v4.Table(rules.Filter)] {
		list = append(list, "-A "+h.Chain+" "+h.Rule.Spec)
	}
	slices.Sort(list)
	return list
}

// missingIn returns the quarantined rules that cannot be written, without the rules that wait for
// them.
func missingIn(q Quarantine) (list []QuarantinedRule) {
	for _, held := range q {
		list = append(list, slices.DeleteFunc(slices.Clone(held), func(h QuarantinedRule) bool { return h.Waits })...)
	}
	return list
}

func eachNode(t *testing.T, test func(t *testing.T, n *testNode)) { eachNodeOf(t, leaningText, test) }

// eachNodeOf is eachNode with these rules.
func eachNodeOf(t *testing.T, text string, test func(t *testing.T, n *testNode)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { test(t, dependentOn(t, backend, text)) })
	}
}

// loseBad destroys the set bad for good.
func (n *testNode) loseBad() {
	n.Sets().Destroy(setBad.Name)
	n.Sets().Refuse(setBad.Name, errors.New("no memory"))
}

func TestMissingSetsComeBackBeforeTheRulesThatNameThem(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		for _, name := range []string{"friends", "members", "bad", "dropped"} {
			n.Sets().Destroy(name)
		}
		n.outcome(n.heal(), v4, Proved)
		n.same(v4)
		made := n.Sets().Created()
		if slices.Index(made[1:], "members") > slices.Index(made[1:], "friends") || len(made) != 5 {
			t.Errorf("made %v, want members before friends that lists it, bad and dropped", made)
		}
		got, err := n.Sets().Save(t.Context(), []string{"bad", "friends", "members"})
		must(t, err)
		if d := cmp.Diff(n.job.Sets, got); d != "" {
			t.Errorf("sets (-want +got):\n%s", d)
		}
	})
}

func TestASetThatStandsIsLeftAsItIs(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		for _, now := range []iptables.Set{{Name: "bad", Create: "hash:ip family inet"}, {Name: "members", Create: "hash:net family inet", Members: []string{"10.9.0.0/16"}}} {
			n.Sets().Put(now)
			defer func() {
				got, err := n.Sets().Save(t.Context(), []string{now.Name})
				must(t, err)
				if d := cmp.Diff(now, got[now.Name]); d != "" {
					t.Errorf("%s (-want +got):\n%s", now.Name, d)
				}
			}()
		}
		n.outcome(n.heal(), v4, Proved)
		n.same(v4)
	})
}

func TestARuleWhoseSetIsMissingIsHeldBackUntilItReturns(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		delete(n.job.Sets, "bad")
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		result := n.heal()
		n.outcome(result, v4, Partial)
		if !result[v4].DoneExceptQuarantined() || !strings.Contains(result[v4].Err.Error(), "ipset bad is missing") {
			t.Errorf("all but: %t, error %v", result[v4].DoneExceptQuarantined(), result[v4].Err)
		}
		n.takeHeld(result)
		reason := "ipset bad is missing, and its members are unknown"
		behind := func(rule, chain string) string {
			return fmt.Sprintf("waits behind %q of %s, which cannot be put back", rule, chain)
		}
		want := Quarantine{v4.Table(rules.Filter): {
			{Chain: "KUBE-FORWARD", Rule: rule("-m set --match-set bad src -j DROP"), Reason: reason},
			{Chain: "KUBE-FORWARD", Rule: rule("-j RETURN"), Reason: behind("-m set --match-set bad src -j DROP", "KUBE-FORWARD"), Waits: true},
			{Chain: "FORWARD", Rule: rule("-m set --match-set bad src -j KUBE-FORWARD"), Reason: reason},
			{Chain: "FORWARD", Rule: rule("-j KUBE-FORWARD"), Reason: behind("-m set --match-set bad src -j KUBE-FORWARD", "FORWARD"), Waits: true},
		}}
		if d := cmp.Diff(want, n.job.Quarantine); d != "" {
			t.Fatalf("quarantine (-want +got):\n%s", d)
		}
		without := func(text string) string {
			return strings.NewReplacer("-A FORWARD -m set --match-set bad src -j KUBE-FORWARD\n", "", "-A FORWARD -j KUBE-FORWARD\n", "",
				"-A KUBE-FORWARD -m set --match-set bad src -j DROP\n", "", "-A KUBE-FORWARD -j RETURN\n", "").Replace(text)
		}
		if d := cmp.Diff(without(n.before[v4]), n.content(v4)); d != "" {
			t.Errorf("the rest of the table (-want +got):\n%s", d)
		}
		if again := n.heal(); again[v4].Outcome != Skipped {
			t.Errorf("another look finds %v", verdicts(again[v4]))
		}
		// Nothing returned: nothing is written.
		writes := n.Restores()
		again, err := n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		n.outcome(again, v4, Skipped)
		if n.Restores() != writes {
			t.Error("it was written although nothing returned")
		}
		// Its owner makes the set.
		n.Sets().Put(setBad)
		again, err = n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		n.outcome(again, v4, Proved)
		n.takeHeld(again)
		if n.job.Quarantine.Count() != 0 {
			t.Errorf("quarantine: %v", n.job.Quarantine)
		}
		n.same(v4)
	})
}

func TestAHeldRuleComesBackWithTheNextReplayToo(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		n.Sets().Refuse("bad", errors.New("no memory"))
		n.takeHeld(n.heal())
		if len(missingIn(n.job.Quarantine)) != 2 {
			t.Fatalf("quarantine: %v", n.job.Quarantine)
		}
		must(t, n.Flush(v4, rules.Filter, "INPUT"))
		result := n.heal() // a replay that does not concern the quarantined rules
		n.outcome(result, v4, Partial)
		n.takeHeld(result)
		if len(missingIn(n.job.Quarantine)) != 2 || n.job.Quarantine.Count() != 4 {
			t.Fatalf("quarantine after another replay: %v", n.job.Quarantine)
		}
		n.Sets().Refuse("bad", nil)
		n.flushAll(v4)
		result = n.heal()
		n.outcome(result, v4, Proved)
		n.takeHeld(result)
		if n.job.Quarantine.Count() != 0 {
			t.Errorf("quarantine: %v", n.job.Quarantine)
		}
		n.same(v4)
	})
}

func TestAMatchThatOnlyCountsIsDroppedRatherThanTheRule(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.Sets().Destroy("dropped")
		n.Sets().Refuse("dropped", errors.New("operation not supported"))
		result := n.heal()
		n.outcome(result, v4, Proved)
		weakened := result[v4].Tables[rules.Filter].Weakened
		if len(weakened) != 1 || weakened[0].Chain != "KUBE-FIREWALL" || weakened[0].Reason != "operation not supported" {
			t.Errorf("weakened: %v", weakened)
		}
		want := strings.Replace(n.before[v4], "-m nfacct --nfacct-name dropped ", "", 1)
		if d := cmp.Diff(want, n.content(v4)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

func TestOneBadLineNeverCostsATable(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.replayer.Supplier = nil // nothing knows which set is missing
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		result := n.heal()
		n.outcome(result, v4, Partial)
		if !result[v4].DoneExceptQuarantined() {
			t.Errorf("%+v", result[v4])
		}
		n.marked(v4)
		n.takeHeld(result)
		for _, h := range missingIn(n.job.Quarantine) {
			if !strings.Contains(h.Rule.Spec, "match-set bad") || !strings.Contains(h.Reason, "bad") {
				t.Errorf("held back: %+v", h)
			}
		}
		saved := n.Save(v4)
		if len(missingIn(n.job.Quarantine)) != 2 || strings.Count(saved, "\n-A KUBE-F") != 3 || strings.Contains(saved, trialChain) {
			t.Errorf("%d rules are held back, and this stands:\n%s", n.job.Quarantine.Count(), saved)
		}
		n.Sets().Put(setBad)
		again, err := n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		n.outcome(again, v4, Proved)
		n.same(v4)
	})
}

// TestWhatIsKnownToBeRefusedIsNotTriedInAnOutage: a rule that was refused before is left out at
// once. A readmission tries it, before all others.
func TestWhatIsKnownToBeRefusedIsNotTriedInAnOutage(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.replayer.Supplier = nil // nothing knows which set is missing
		n.Sets().Destroy("bad")
		n.flushAll(v4)
		n.takeHeld(n.heal())
		if len(missingIn(n.job.Quarantine)) != 2 {
			t.Fatalf("quarantine: %v", n.job.Quarantine)
		}
		held := n.job.Quarantine
		for _, flush := range []func(){
			func() { n.flushAll(v4) },
			func() { must(t, n.Flush(v4, rules.Filter, "FORWARD")) },
		} {
			flush()
			before := n.Restores()
			result := n.heal()
			n.outcome(result, v4, Partial)
			if !result[v4].DoneExceptQuarantined() {
				t.Errorf("%+v", result[v4])
			}
			n.takeHeld(result)
			writes := n.Restores() - before
			if nudges := 1; writes > 1+nudges {
				t.Errorf("%d restores, want one without the rules that are known", writes)
			}
			inOrder := cmpopts.SortSlices(func(a, b QuarantinedRule) bool { return a.Chain+a.Rule.Spec < b.Chain+b.Rule.Spec })
			if d := cmp.Diff(held, n.job.Quarantine, inOrder); d != "" {
				t.Errorf("quarantine (-want +got):\n%s", d)
			}
		}
		before := n.Restores()
		again, err := n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		n.outcome(again, v4, Skipped) // after trials, there is nothing to write
		// The restores are: one as a whole, an empty one, both suspects, each of them, the others,
		// and the removal of the trial's chains.
		if tried := n.Restores() - before; tried != 7 {
			t.Errorf("a readmission that fails took %d restores, want 7", tried)
		}
		n.Sets().Put(setBad)
		again, err = n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		n.outcome(again, v4, Proved)
		n.takeHeld(again)
		n.same(v4)
	})
}

func TestARefusalThatIsForNoRuleIsNotBlamedOnRules(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.FailRestores(-1, iptables.ReasonOther)
		result := n.heal()
		n.outcome(result, v4, Failed)
		for _, tr := range result[v4].Tables {
			if len(tr.Quarantined) > 0 {
				t.Errorf("held back: %v", tr.Quarantined)
			}
		}
		n.FailRestores(1, iptables.ReasonParse) // once: no single rule is refused again
		result = n.heal()
		n.outcome(result, v4, Partial) // all tables but the first
		for table, tr := range result[v4].Tables {
			if len(tr.Quarantined) > 0 || tr.Proved != (table != rules.Mangle) {
				t.Errorf("%s: proved %t, held back %v", table, tr.Proved, tr.Quarantined)
			}
		}
		n.outcome(n.heal(), v4, Proved)
	})
}

func TestAStrictJobIsWrittenAsAWholeOrNotAtAll(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		n.replayer.Supplier, n.job.Strict = nil, true
		n.outcome(n.heal(), v4, Partial) // mangle and nat are written
		if saved := n.SaveTable(v4, rules.Filter); strings.Contains(saved, "-A KUBE-F") {
			t.Errorf("half of filter was written:\n%s", saved)
		}
	})
}

// TestSiftingFindsTheBadOnes: some rules of a long list are refused. The search finds exactly
// these, within the bound.
func TestSiftingFindsTheBadOnes(t *testing.T) {
	for _, bad := range [][]int{{0}, {499}, {17, 18}, {1, 100, 250, 499}} {
		n := newNode(t, iptables.Legacy, strings.ReplaceAll(strings.ReplaceAll(nodeText, "-A KUBE-FORWARD -j corp\n", ""), ":KUBE-FIREWALL", ":KUBE-LONG - [0:0]\n-A KUBE-LONG -j RETURN\n:KUBE-FIREWALL"), v4)
		section := n.job.Generation[v4.Table(rules.Filter)]
		long := rules.Chain{Name: "KUBE-LONG"}
		for i := range 500 {
			spec := fmt.Sprintf("-s 10.0.%d.%d/32 -j RETURN", i/256, i%256)
			if slices.Contains(bad, i) {
				spec = fmt.Sprintf("-s 10.0.%d.%d/32 -j nosuch", i/256, i%256)
			}
			long.Rules = append(long.Rules, rule(spec))
		}
		section.Chains = slices.Clone(section.Chains)
		section.Chains[slices.IndexFunc(section.Chains, func(c rules.Chain) bool { return c.Name == long.Name })] = long
		n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), section)
		n.flushAll(v4)
		before := n.Restores()
		result := n.heal()
		n.outcome(result, v4, Partial)
		var found []int
		for _, h := range missingIn(Quarantine{v4.Table(rules.Filter): result[v4].Tables[rules.Filter].Quarantined}) {
			found = append(found, slices.IndexFunc(long.Rules, func(r rules.Rule) bool { return r == h.Rule }))
		}
		if d := cmp.Diff(bad, found); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		if tried := n.Restores() - before; tried > 2*10*len(bad)+10 {
			t.Errorf("%d restores for %d bad rules of 500", tried, len(bad))
		}
	}
}

func TestTheOwnersLastWordEndsAQuarantine(t *testing.T) {
	want := sectionOf(t, rules.Filter, ":corp", ":KUBE-A", ":KUBE-B", "-A INPUT -j KUBE-A", "-A FORWARD -j KUBE-A", "-A KUBE-A -j corp", "-A KUBE-A -j RETURN", "-A KUBE-B -j corp", "-A corp -j RETURN")
	held := Quarantine{v4.Table(rules.Filter): {
		{Chain: "KUBE-A", Rule: rule("-j corp"), MissingChain: "corp"}, {Chain: "KUBE-B", Rule: rule("-j corp"), MissingChain: "corp"}, {Chain: "FORWARD", Rule: rule("-j KUBE-A")},
	}}
	left := []string{":KUBE-A", ":KUBE-B", "-A INPUT -j KUBE-A", "-A KUBE-A -j RETURN"}
	tests := []struct {
		name   string
		lines  []string
		still  []string // chains with something quarantined
		known  bool     // the section is the generation's
		shrunk bool     // the quarantine of KUBE-B ends when Learn accepts that it is gone
	}{
		{"as it was left", left, []string{"KUBE-A", "KUBE-B", "FORWARD"}, true, false},
		{"the owner rewrote a chain", append(slices.Clone(left), "-A KUBE-A -j DROP"), []string{"KUBE-B", "FORWARD"}, false, false},
		{"the owner put the rule back", []string{":corp", ":KUBE-A", ":KUBE-B", "-A INPUT -j KUBE-A", "-A KUBE-A -j corp", "-A KUBE-A -j RETURN"}, []string{"KUBE-B", "FORWARD"}, true, false},
		{"and the jump", append([]string{"-A FORWARD -j KUBE-A"}, left...), []string{"KUBE-A", "KUBE-B"}, true, false},
		{"the owner removed a chain", []string{":KUBE-A", "-A INPUT -j KUBE-A", "-A KUBE-A -j RETURN"}, []string{"KUBE-A", "KUBE-B", "FORWARD"}, false, true},
	}
	for _, test := range tests {
		slices.SortStableFunc(test.lines, func(a, b string) int { return strings.Compare(b[:1], a[:1]) }) // declarations first
		got, still := held.Supplement(v4, rules.Filter, want, sectionOf(t, rules.Filter, test.lines...), nil)
		chains := func(q Quarantine) (list []string) {
			for _, h := range q[v4.Table(rules.Filter)] {
				list = append(list, h.Chain)
			}
			return list
		}
		if d := cmp.Diff(test.still, chains(still)); d != "" {
			t.Errorf("%s: still held back (-want +got):\n%s", test.name, d)
		}
		_, still = still.Supplement(v4, rules.Filter, got, sectionOf(t, rules.Filter, test.lines...), nil)
		learned := slices.DeleteFunc(slices.Clone(test.still), func(chain string) bool { return test.shrunk && chain == "KUBE-B" })
		if d := cmp.Diff(learned, chains(still)); d != "" {
			t.Errorf("%s: still held back when it is learned (-want +got):\n%s", test.name, d)
		}
		if got.Equal(want) != test.known {
			t.Errorf("%s: it is the generation: %t\n%v", test.name, got.Equal(want), got)
		}
	}
}

// TestRulesThatWaitOutliveTheRuleThatTheyWaitFor: an owner writes back the missing rule, which
// decides nothing about the rules that wait for it. An owner that writes the chain as a whole
// decides about them.
func TestRulesThatWaitOutliveTheRuleThatTheyWaitFor(t *testing.T) {
	const first, odd, second, third = "-s 192.0.2.1/32 -j ACCEPT", "-m odd -j RETURN", "-s 192.0.2.2/32 -j ACCEPT", "-s 192.0.2.3/32 -j ACCEPT"
	const foreign = "-s 192.0.2.4/32 -j ACCEPT"
	chain := func(specs ...string) rules.Section {
		lines := []string{":KUBE-A"}
		for _, spec := range specs {
			lines = append(lines, "-A KUBE-A "+spec)
		}
		return sectionOf(t, rules.Filter, lines...)
	}
	want := chain(first, odd, second, third)
	held := Quarantine{v4.Table(rules.Filter): {
		{Chain: "KUBE-A", Rule: rule(odd)}, {Chain: "KUBE-A", Rule: rule(second), Waits: true}, {Chain: "KUBE-A", Rule: rule(third), Waits: true},
	}}
	tests := []struct {
		name             string
		seen             []string
		learned, still   []string // for a chain that its owner writes as a whole
		learnedP, stillP []string // for a piecewise chain
	}{
		{
			"as it was left", []string{first},
			[]string{first, odd, second, third}, []string{odd, second, third}, []string{first, odd, second, third}, []string{odd, second, third},
		},
		{
			"the rule is back in its place", []string{first, odd},
			[]string{first, odd, second, third}, []string{second, third}, []string{first, odd, second, third}, []string{second, third},
		},
		{
			"the rule is back at the top", []string{odd, first},
			[]string{odd, first, second, third}, []string{second, third}, []string{odd, first, second, third}, []string{second, third},
		},
		{
			"all is back", []string{first, odd, second, third},
			[]string{first, odd, second, third}, nil, []string{first, odd, second, third}, nil,
		},
		{
			"a rule that waits is not written again", []string{first, odd, third},
			[]string{first, odd, third}, nil, []string{first, odd, second, third}, []string{second},
		},
		{
			"a new rule", []string{first, foreign},
			[]string{first, foreign}, nil, []string{first, odd, second, third, foreign}, []string{odd, second, third},
		},
		{
			"the chain is empty", []string{},
			[]string{}, []string{odd, second, third}, []string{odd, second, third}, []string{odd, second, third},
		},
		{
			"another chain", []string{foreign},
			[]string{foreign}, nil, []string{odd, second, third, foreign}, []string{odd, second, third},
		},
	}
	for _, test := range tests {
		for _, piecewise := range []bool{false, true} {
			learned, still := test.learned, test.still
			if piecewise {
				learned, still = test.learnedP, test.stillP
			}
			got, next := held.Supplement(v4, rules.Filter, want, chain(test.seen...), func(string) bool { return piecewise })
			if d := cmp.Diff(chain(learned...), got); d != "" {
				t.Errorf("%s (piecewise %t): learned (-want +got):\n%s", test.name, piecewise, d)
			}
			var left []string
			for _, h := range next[v4.Table(rules.Filter)] {
				left = append(left, h.Rule.Spec)
			}
			if d := cmp.Diff(still, left); d != "" {
				t.Errorf("%s (piecewise %t): in quarantine (-want +got):\n%s", test.name, piecewise, d)
			}
		}
	}
}

// TestAReplayOnRequestKeepsWhatCannotBeHad: a rule in force could not be written. A replay on
// request keeps it and the rules behind it. It removes rules that the generation lacks, and puts
// missing rules back in their place.
func TestAReplayOnRequestKeepsWhatCannotBeHad(t *testing.T) {
	const first, odd, second, third, stale = "-s 192.0.2.1/32 -j ACCEPT", "-m set --match-set bad src -j DROP", "-s 192.0.2.2/32 -j ACCEPT",
		"-s 192.0.2.3/32 -j DROP", "-s 192.0.2.4/32 -j ACCEPT"
	tests := []struct {
		name           string
		stands, want   []string
		missing, waits int
	}{
		{"the rule stands", []string{odd, second}, []string{first, odd, second, third}, 0, 0},
		{"the rule stands among stale ones", []string{stale, odd, stale, third}, []string{first, odd, second, third}, 0, 0},
		{"the rule is missing", []string{stale, third}, []string{first, third}, 1, 1},
		{"the rule and all before it are missing", []string{second, third}, []string{first, second, third}, 1, 0},
		{"nothing stands", nil, []string{first}, 1, 2},
		{"nothing of it stands", []string{stale}, []string{first}, 1, 2},
		{"the order is another", []string{third, odd, second, first}, []string{first, odd, second, third}, 0, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachNode(t, func(t *testing.T, n *testNode) {
				write := func(list []string) {
					text := "*filter\n:KUBE-FORWARD - [0:0]\n"
					for _, spec := range list {
						text += "-A KUBE-FORWARD " + spec + "\n"
					}
					must(t, n.RestoreNoflush(v4, text+"COMMIT\n"))
				}
				must(t, n.RestoreNoflush(v4, "*filter\n-D FORWARD -m set --match-set bad src -j KUBE-FORWARD\nCOMMIT\n"))
				write([]string{first, odd, second, third})
				snapshot, err := n.Fake.Read(t.Context(), v4)
				must(t, err)
				n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), n.replayer.Protection.Extract(snapshot.Tables[rules.Filter], canary.IsMark))
				write(test.stands)
				n.Sets().Destroy("bad")
				n.Sets().Refuse("bad", errors.New("no memory"))
				result, err := n.replayer.Force(t.Context(), n.job)
				must(t, err)
				got := result[v4].Tables[rules.Filter]
				if !got.Proved {
					t.Fatalf("it is not proved: %v", result[v4].Err)
				}
				var stands []string
				for _, r := range got.Table.Rules("KUBE-FORWARD") {
					stands = append(stands, r.Spec)
				}
				if d := cmp.Diff(test.want, stands); d != "" {
					t.Errorf("KUBE-FORWARD (-want +got):\n%s", d)
				}
				missing, waiting := 0, 0
				for _, h := range got.Quarantined {
					switch {
					case h.Chain != "KUBE-FORWARD":
					case h.Waits:
						waiting++
					default:
						missing++
					}
				}
				if missing != test.missing || waiting != test.waits {
					t.Errorf("%d rules cannot be had and %d wait, want %d and %d: %+v", missing, waiting, test.missing, test.waits, got.Quarantined)
				}
			})
		})
	}
}

// TestARestoreWithoutEffectIsBisected: a restore that ends with 0 and without its effect is
// bisected like a refused one.
func TestARestoreWithoutEffectIsBisected(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		const bad = "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP"
		must(t, n.Flush(v4, rules.Filter, ""))
		n.Swallow("--mark 0x8000/0x8000")
		result := n.heal()
		filter := result[v4].Tables[rules.Filter]
		if !filter.Proved || len(filter.Quarantined) != 1 || "-A "+filter.Quarantined[0].Chain+" "+filter.Quarantined[0].Rule.Spec != bad {
			t.Fatalf("proved %t, in quarantine %+v, %v", filter.Proved, filter.Quarantined, result[v4].Err)
		}
		if got := filter.Quarantined[0]; !got.Refused || got.Reason != errNoEffect.Error() {
			t.Errorf("the rule is in quarantine because %q, refused %t", got.Reason, got.Refused)
		}
		if got, want := n.content(v4), strings.Replace(n.before[v4], bad+"\n", "", 1); got != want {
			t.Errorf("the rest is not back (-want +got):\n%s", cmp.Diff(want, got))
		}
	})
}

// wantOpaque has the node want an opaque rule, in a protected chain and as a jump.
func (n *testNode) wantOpaque(opaque rules.Rule) {
	filter := n.job.Generation[v4.Table(rules.Filter)]
	filter.Chains = slices.Clone(filter.Chains)
	at := slices.IndexFunc(filter.Chains, func(c rules.Chain) bool { return c.Name == "KUBE-FORWARD" })
	filter.Chains[at].Rules = append([]rules.Rule{opaque}, filter.Chains[at].Rules...)
	filter.Jumps = append(slices.Clone(filter.Jumps), rules.Jump{Chain: "OUTPUT", Rule: opaque, Anchor: rules.Anchor{Position: rules.Top}})
	n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), filter)
}

// TestARuleWithoutATextComesBackByItsBytes: a rule without a text is restored by its bytes, in its
// place.
func TestARuleWithoutATextComesBackByItsBytes(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		opaque := rules.OpaqueBytes([]byte("x"), nil, "KUBE-FIREWALL", "its comment holds a line break")
		n.wantOpaque(opaque)
		must(t, n.Flush(v4, rules.Filter, ""))
		result := n.heal()
		got := result[v4].Tables[rules.Filter]
		if !got.Proved {
			t.Fatalf("it is not proved: %v", result[v4].Err)
		}
		forward, output := got.Table.Chain("KUBE-FORWARD").Rules, got.Table.Chain("OUTPUT").Rules
		if len(got.Quarantined) != 0 || forward[0] != opaque || !slices.Contains(output, opaque) {
			t.Errorf("in quarantine: %+v; KUBE-FORWARD is %v and OUTPUT %v", got.Quarantined, forward, output)
		}
	})
}

// TestARuleWithoutATextIsLeftOut: a rule with neither a text nor bytes is left out, with its
// reason, and everything else is back.
func TestARuleWithoutATextIsLeftOut(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		opaque := rules.OpaqueRule([]byte("x"), "KUBE-FIREWALL", "its comment holds a line break")
		n.wantOpaque(opaque)
		must(t, n.Flush(v4, rules.Filter, ""))
		result := n.heal()
		got := result[v4].Tables[rules.Filter]
		missing := missingIn(Quarantine{v4.Table(rules.Filter): got.Quarantined})
		if !got.Proved || len(missing) != 2 {
			t.Fatalf("proved %t, in quarantine %+v, %v", got.Proved, got.Quarantined, result[v4].Err)
		}
		for _, h := range missing {
			if h.Rule != opaque || h.Refused || h.Reason != "its comment holds a line break; its owner has to put it back" {
				t.Errorf("in quarantine: %+v", h)
			}
		}
		// All of KUBE-FORWARD waits behind the rule, and the second jump to it behind the first.
		var want strings.Builder
		for line := range strings.Lines(n.before[v4]) {
			if !strings.HasPrefix(line, "-A KUBE-FORWARD ") && line != "-A FORWARD -j KUBE-FORWARD\n" {
				want.WriteString(line)
			}
		}
		if d := cmp.Diff(want.String(), n.content(v4)); d != "" {
			t.Errorf("the rest is not back (-want +got):\n%s", d)
		}
	})
}
