package reload

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ufwDockerText is a node with ufw-docker: DOCKER-USER leads to chains of ufw, which hold the DROP.
// ufw's own jump from FORWARD also leads to one of them.
const ufwDockerText = `*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
:ufw-before-forward - [0:0]
:ufw-docker-logging-deny - [0:0]
:ufw-empty - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -j DOCKER
-A DOCKER -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER-USER -j ufw-user-forward
-A DOCKER-USER -s 192.168.0.0/16 -j RETURN
-A DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny
-A DOCKER-USER -j RETURN
-A ufw-before-forward -j ufw-user-forward
-A ufw-docker-logging-deny -j ufw-empty
-A ufw-docker-logging-deny -j DROP
-A ufw-user-forward -s 198.51.100.1/32 -d 172.17.0.2/32 -j ACCEPT
COMMIT
`

// newUfwNode returns a node that learned ufwDockerText with --protect=docker.
func newUfwNode(t *testing.T, backend iptables.Backend) *testNode {
	t.Helper()
	selector, err := protect.NewSelector([]string{"docker"})
	must(t, err)
	n := &testNode{Fake: iptablestest.NewFake(backend, v4), t: t, before: map[rules.Family]string{}}
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: selector.Protection()}
	n.job = Job{Families: []rules.Family{v4}, Generation: rules.Generation{}, Quiet: map[rules.Family]bool{}}
	must(t, n.RestoreNoflush(v4, ufwDockerText))
	n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), n.filter())
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	n.before[v4] = n.content(v4)
	return n
}

// filter returns the guarded part of the table filter in the kernel.
func (n *testNode) filter() rules.Section {
	n.t.Helper()
	snapshot, err := n.Fake.Read(n.t.Context(), v4)
	must(n.t, err)
	return n.replayer.Protection.Extract(snapshot.Tables[rules.Filter], canary.IsMark)
}

// onlyLost returns a text without these lines.
func onlyLost(text string, lines ...string) string {
	for _, line := range lines {
		text = strings.Replace(text, line+"\n", "", 1)
	}
	return text
}

func TestAChainOfOthersThatProtectedRulesLeadToComesBack(t *testing.T) {
	const managers = "-A FORWARD -j ufw-before-forward" // ufw's own: neither it nor its chain is guarded
	rewritten := func(text string) string {
		return strings.Replace(text, "-A ufw-user-forward -s 198.51.100.1/32 -d 172.17.0.2/32 -j ACCEPT", "-A ufw-user-forward -j DROP", 1)
	}
	for _, test := range []struct {
		name  string
		flush func(n *testNode) error
		want  func(before string) string
	}{
		{"all rules", func(n *testNode) error { return n.Flush(v4, rules.Filter, "") }, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward")
		}},
		{"all rules and chains", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.DeleteChains(v4, rules.Filter)
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward", ":ufw-before-forward - [0:0]")
		}},
		{"all rules, and its owner deletes the chain", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.RestoreNoflush(v4, "*filter\n-X ufw-docker-logging-deny\nCOMMIT\n")
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward")
		}},
		{"all rules, and its owner writes it again", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.RestoreNoflush(v4, "*filter\n-A ufw-user-forward -j DROP\nCOMMIT\n")
		}, func(before string) string {
			return rewritten(onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward"))
		}},
		{"a saved file with other rules in it", func(n *testNode) error {
			return n.Restore(v4, strings.ReplaceAll(strings.ReplaceAll(rewritten(n.Save(v4)), "canaryd-canary:", "canaryd-canary:0"), "-A DOCKER-USER -j ufw-user-forward\n", ""))
		}, rewritten},
		{"a saved file without them", func(n *testNode) error {
			return n.Restore(v4, "*filter\n:FORWARD DROP [0:0]\n:DOCKER - [0:0]\n:"+canary.DefaultChain+" - [0:0]\n-A "+canary.DefaultChain+
				" -m comment --comment \"canaryd-canary:0123456789abcdef\"\nCOMMIT\n")
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward", ":ufw-before-forward - [0:0]")
		}},
		{"the jump and, by its name, the chain", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, "ufw-docker-logging-deny"))
			return n.Flush(v4, rules.Filter, "FORWARD")
		}, func(before string) string { return onlyLost(before, managers) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
				t.Run(string(backend), func(t *testing.T) {
					n := newUfwNode(t, backend)
					must(t, test.flush(n))
					n.outcome(n.heal(), v4, Proved)
					if d := cmp.Diff(test.want(n.before[v4]), n.content(v4)); d != "" {
						t.Errorf("(-want +got):\n%s", d)
					}
					if again := n.heal(); again[v4].Outcome != Skipped {
						t.Errorf("another look finds %v", verdicts(again[v4]))
					}
				})
			}
		})
	}
}

// onUfw runs a test on a node with ufw-docker, on each backend.
func onUfw(t *testing.T, test func(t *testing.T, n *testNode)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { test(t, newUfwNode(t, backend)) })
	}
}

// TestAnOwnerWritesItsChainsAsItLikes: ufw empties, deletes and rewrites its chains while the marks
// are in force. That is no loss. canaryd learns additions at once, and removals after two seconds.
func TestAnOwnerWritesItsChainsAsItLikes(t *testing.T) {
	for _, test := range []struct {
		name  string
		lines string
		soon  string // the generation's rules of ufw's chains, at once and 2 s later
		late  string
	}{
		{"another rule", "-A ufw-user-forward -j DROP", "ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 2", "ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 2"},
		{"one more chain", ":ufw-more - [0:0]\n-A ufw-more -j DROP\n-A ufw-empty -j ufw-more",
			"ufw-docker-logging-deny 2 ufw-empty 1 ufw-more 1 ufw-user-forward 1", "ufw-docker-logging-deny 2 ufw-empty 1 ufw-more 1 ufw-user-forward 1"},
		{"an empty chain", "-F ufw-user-forward", "ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 1", "ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 0"},
		{"no jump to a chain", "-D DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny",
			"ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 1", "ufw-user-forward 1"},
		{"no chain at all", "-D DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny\n-F ufw-docker-logging-deny\n-X ufw-docker-logging-deny",
			"ufw-docker-logging-deny 2 ufw-empty 0 ufw-user-forward 1", "ufw-user-forward 1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			onUfw(t, func(t *testing.T, n *testNode) {
				must(t, n.RestoreNoflush(v4, "*filter\n"+test.lines+"\nCOMMIT\n"))
				now := n.content(v4)
				if result := n.heal(); result[v4].Outcome != Skipped {
					t.Fatalf("it is %v", verdicts(result[v4]))
				}
				if d := cmp.Diff(now, n.content(v4)); d != "" {
					t.Errorf("(-before +now):\n%s", d)
				}
				learned := Learned{Generation: n.job.Generation}
				for _, at := range []struct {
					after time.Duration
					want  string
				}{{0, test.soon}, {shrinkDelay, test.late}} {
					learned, _ = learned.Learn(v4, rules.Filter, n.filter(), canary.Finding{Verdict: canary.Changed}, noon.Add(at.after))
					section := learned.Generation[v4.Table(rules.Filter)]
					var got []string
					for _, name := range section.LedTo {
						c, _ := section.Chain(name)
						got = append(got, name, fmt.Sprint(len(c.Rules)))
					}
					if d := cmp.Diff(at.want, strings.Join(got, " ")); d != "" {
						t.Errorf("%s later (-want +got):\n%s", at.after, d)
					}
				}
			})
		})
	}
}

// TestOnlyItsOwnerDeletesAChainOfOthers: a chain that protected rules lead to stays, even if
// canaryd removes all protected chains.
func TestOnlyItsOwnerDeletesAChainOfOthers(t *testing.T) {
	const more = ":DOCKER-CT - [0:0]\n:ufw-more - [0:0]\n-A DOCKER-CT -j ufw-more\n-A ufw-more -j DOCKER-CT\n-A ufw-user-forward -j DROP\n"
	for _, test := range []struct {
		name string
		do   func(n *testNode)
		gone []string
	}{
		{"a saved file had it", func(n *testNode) {
			saved := strings.Replace(n.Save(v4), "canaryd-canary:", "canaryd-canary:0", 1)
			must(n.t, n.Restore(v4, strings.Replace(saved, "-A FORWARD -j DOCKER-USER\n", more+"-A FORWARD -j DOCKER-USER\n", 1)))
			n.outcome(n.heal(), v4, Proved)
		}, nil},
		{"an older generation is restored", func(n *testNode) {
			must(n.t, n.RestoreNoflush(v4, "*filter\n"+more+"COMMIT\n"))
			result, err := n.replayer.Force(n.t.Context(), n.job)
			must(n.t, err)
			n.outcome(result, v4, Proved)
		}, nil},
		{"everything protected is removed", func(n *testNode) {
			must(n.t, n.RestoreNoflush(v4, "*filter\n"+strings.Replace(more, "-A ufw-more -j DOCKER-CT\n", "", 1)+"COMMIT\n"))
			result, err := n.replayer.Remove(n.t.Context(), n.job, true)
			must(n.t, err)
			n.outcome(result, v4, Proved)
		}, []string{":DOCKER - [0:0]", ":DOCKER-USER - [0:0]", "-A FORWARD -j DOCKER-USER"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			onUfw(t, func(t *testing.T, n *testNode) {
				test.do(n)
				now := n.content(v4)
				for _, line := range []string{":ufw-more - [0:0]", "-A ufw-user-forward -j DROP", "-A ufw-docker-logging-deny -j DROP", "-A ufw-before-forward -j ufw-user-forward"} {
					if !strings.Contains(now, line+"\n") {
						t.Errorf("%q is gone:\n%s", line, now)
					}
				}
				for _, line := range test.gone {
					if strings.Contains(now, line+"\n") {
						t.Errorf("%q is there:\n%s", line, now)
					}
				}
			})
		})
	}
}

// examine reads and learns filter, as a daemon does with each examination.
func (n *testNode) examine(learned Learned, now time.Time) Learned {
	n.t.Helper()
	snapshot, err := n.Fake.Read(n.t.Context(), v4)
	must(n.t, err)
	n.job.Generation = learned.Generation
	x := Examiner{Canary: n.replayer.Canary, Protection: n.replayer.Protection}.Examine(snapshot, n.job)[rules.Filter]
	full, quarantine := n.job.Quarantine.Supplement(v4, rules.Filter, learned.Generation[v4.Table(rules.Filter)], x.Section, n.replayer.Protection.Piecewise)
	learned, _ = learned.Learn(v4, rules.Filter, full, x.Finding, now)
	n.job.Quarantine, n.job.Generation = quarantine, learned.Generation
	return learned
}

// TestAChainBehindAQuarantinedRule: no rule leads to the chain until the quarantined rule is back.
// Rules that its owner writes meanwhile count at once, and deletions after two seconds.
func TestAChainBehindAQuarantinedRule(t *testing.T) {
	const accepts = "-A ufw-user-forward -s 198.51.100.1/32 -d 172.17.0.2/32 -j ACCEPT"
	for _, test := range []struct {
		name  string
		lines string
		led   string // the chains that protected rules lead to, right after that and 2 s later
		late  string
		want  []string // lines of ufw-user-forward after a flush and a replay
		lacks string   // the chain that the rule lacks when it is tried
	}{
		{"nothing", "", "ufw-docker-logging-deny ufw-empty ufw-user-forward", "ufw-docker-logging-deny ufw-empty ufw-user-forward", []string{accepts}, ""},
		{"other rules", "-F ufw-user-forward\n-A ufw-user-forward -j DROP\n", "ufw-docker-logging-deny ufw-empty ufw-user-forward",
			"ufw-docker-logging-deny ufw-empty ufw-user-forward", []string{"-A ufw-user-forward -j DROP"}, ""},
		{"no rules", "-F ufw-user-forward\n", "ufw-docker-logging-deny ufw-empty ufw-user-forward", "ufw-docker-logging-deny ufw-empty ufw-user-forward", nil, ""},
		{"another chain behind it", ":ufw-more - [0:0]\n-A ufw-user-forward -j ufw-more\n", "ufw-docker-logging-deny ufw-empty ufw-more ufw-user-forward",
			"ufw-docker-logging-deny ufw-empty ufw-more ufw-user-forward", []string{accepts, "-A ufw-user-forward -j ufw-more"}, ""},
		{"no chain", "-F ufw-before-forward\n-F ufw-user-forward\n-X ufw-user-forward\n", "ufw-docker-logging-deny ufw-empty ufw-user-forward",
			"ufw-docker-logging-deny ufw-empty", nil, "ufw-user-forward"},
	} {
		t.Run(test.name, func(t *testing.T) {
			onUfw(t, func(t *testing.T, n *testNode) {
				id := v4.Table(rules.Filter)
				user, _ := n.filter().Chain("DOCKER-USER")
				n.job.Quarantine = Quarantine{id: {{Chain: "DOCKER-USER", Rule: user.Rules[0], Reason: "a test"}}}
				must(t, n.RestoreNoflush(v4, "*filter\n-D DOCKER-USER 1\n"+test.lines+"COMMIT\n"))
				learned := Learned{Generation: n.job.Generation}
				for _, at := range []struct {
					after time.Duration
					want  string
				}{{0, test.led}, {shrinkDelay, test.late}} {
					learned = n.examine(learned, noon.Add(at.after))
					if d := cmp.Diff(at.want, strings.Join(learned.Generation[id].LedTo, " ")); d != "" {
						t.Errorf("%s later (-want +got):\n%s", at.after, d)
					}
				}
				if n.job.Quarantine.Count() != 1 {
					t.Fatalf("in quarantine %v", n.job.Quarantine)
				}
				must(t, n.Flush(v4, rules.Filter, ""))
				n.takeHeld(n.heal())
				var got []string
				for line := range strings.Lines(n.content(v4)) {
					if strings.HasPrefix(line, "-A ufw-user-forward ") {
						got = append(got, strings.TrimSpace(line))
					}
				}
				if d := cmp.Diff(test.want, got); d != "" {
					t.Errorf("ufw-user-forward after a replay (-want +got):\n%s", d)
				}
				for _, h := range missingIn(n.job.Quarantine) {
					if h.Rule != user.Rules[0] || h.MissingChain != test.lacks {
						t.Errorf("in quarantine: %+v", h)
					}
				}
				if test.lacks == "" {
					return
				}
				if missing := missingIn(n.job.Quarantine); len(missing) != 1 {
					t.Fatalf("%d rules cannot be had: %v", len(missing), missing)
				}
				must(t, n.RestoreNoflush(v4, "*filter\n:"+test.lacks+" - [0:0]\n-A "+test.lacks+" -j DROP\nCOMMIT\n"))
				result, err := n.replayer.Readmit(t.Context(), n.job)
				must(t, err)
				n.outcome(result, v4, Proved)
				if now := n.filter(); !rules.EqualRules(n.chain("DOCKER-USER"), user.Rules) || !now.IsLedTo(test.lacks) {
					t.Errorf("DOCKER-USER is %v, led to %v", n.chain("DOCKER-USER"), now.LedTo)
				}
			})
		})
	}
}

// chain returns the rules of a chain of filter.
func (n *testNode) chain(name string) []rules.Rule {
	c, _ := n.filter().Chain(name)
	return c.Rules
}

// TestARuleWaitsForAChainThatItsOwnerDeleted: another owner deletes a chain that protected rules
// lead to. That is no loss, so no replay writes it.
func TestARuleWaitsForAChainThatItsOwnerDeleted(t *testing.T) {
	onUfw(t, func(t *testing.T, n *testNode) {
		user := n.chain("DOCKER-USER")
		n.job.Quarantine = Quarantine{v4.Table(rules.Filter): {
			{Chain: "DOCKER-USER", Rule: user[0], Reason: "a test"}, {Chain: "DOCKER-USER", Rule: user[1], Reason: "a test"},
		}}
		must(t, n.RestoreNoflush(v4, "*filter\n-D DOCKER-USER 1\n-D DOCKER-USER 1\n-F ufw-before-forward\n-F ufw-user-forward\n-X ufw-user-forward\nCOMMIT\n"))
		restores := n.Restores()
		result, err := n.replayer.Readmit(t.Context(), n.job)
		must(t, err)
		if result[v4].Outcome != Skipped || n.Restores() != restores {
			t.Errorf("%s: %v, after %d restores", result[v4].Outcome, result[v4].Err, n.Restores()-restores)
		}
	})
}

// TestAStoredGenerationDependsOnChainsThatAreLedTo: an older canaryd did not follow such chains,
// and its file names them in DependsOn.
func TestAStoredGenerationDependsOnChainsThatAreLedTo(t *testing.T) {
	onUfw(t, func(t *testing.T, n *testNode) {
		id := v4.Table(rules.Filter)
		stored := n.job.Generation[id]
		led := stored.LedTo
		stored.DependsOn, stored.LedTo = []string{"elsewhere", "ufw-docker-logging-deny", "ufw-user-forward"}, nil
		stored.Chains = slices.DeleteFunc(slices.Clone(stored.Chains), func(c rules.Chain) bool { return slices.Contains(led, c.Name) })
		stored.Chains = append(stored.Chains, rules.Chain{Name: "DOCKER-GONE", Rules: ruleList("-j elsewhere")}) // so that a chain is kept
		learned := n.examine(Learned{Generation: rules.Generation{id: stored}}, noon)
		if d := cmp.Diff([]string{"elsewhere"}, learned.Generation[id].DependsOn); d != "" {
			t.Errorf("depends on (-want +got):\n%s", d)
		}
	})
}

// TestARuleIsWrittenWithTheChainThatItLeadsTo: this also holds if a generation names that chain in
// DependsOn, as an earlier version joined it.
func TestARuleIsWrittenWithTheChainThatItLeadsTo(t *testing.T) {
	onUfw(t, func(t *testing.T, n *testNode) {
		id := v4.Table(rules.Filter)
		both := n.job.Generation[id]
		both.DependsOn = both.LedTo
		n.job.Generation = n.job.Generation.With(id, both)
		must(t, n.Flush(v4, rules.Filter, ""))
		must(t, n.DeleteChains(v4, rules.Filter))
		result := n.heal()
		n.outcome(result, v4, Proved)
		if held := result[v4].Tables[rules.Filter].Quarantined; len(held) > 0 {
			t.Errorf("in quarantine %v", held)
		}
	})
}
