package scenario

import (
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestCasesLoad(t *testing.T) {
	onEach(t, func(t *testing.T, p Flusher) {
		for _, family := range rules.Families() {
			for _, name := range Cases(family) {
				must(t, Wipe(t.Context(), p, family))
				must(t, p.Restore(t.Context(), family, KubeProxy(name)))
				text := KubeProxy(name)
				alone := tables(t, p, family)
				if got, want := alone[rules.Nat].RuleCount()+alone[rules.Filter].RuleCount(), strings.Count(text, "\n-A "); got != want {
					t.Errorf("%s: nat and filter hold %d rules, want %d", name, got, want)
				}
				must(t, Wipe(t.Context(), p, family))
				must(t, LoadParts(t.Context(), p, family, Node(family, name)))
				whole := tables(t, p, family)
				if got := whole[rules.Filter].Chain("FORWARD").Policy; got != "DROP" {
					t.Errorf("%s: loading the node made FORWARD's policy %s, want DROP", name, got)
				}
				for _, chain := range alone[rules.Nat].Chains {
					if !rules.Builtin(rules.Nat, chain.Name) && whole[rules.Nat].Chain(chain.Name) == nil {
						t.Errorf("%s: the node lacks %s", name, chain.Name)
					}
				}
			}
		}
	})
}

// TestOwnersLoad: the programs' recorded rules load, and presets name all of them.
func TestOwnersLoad(t *testing.T) {
	onEach(t, func(t *testing.T, p Flusher) {
		for _, family := range rules.Families() {
			for _, name := range Owners() {
				part := Owner(family, name)
				if part.Text == "" {
					continue
				}
				must(t, Wipe(t.Context(), p, family))
				must(t, LoadParts(t.Context(), p, family, []Part{part}))
				s, err := protect.NewSelector([]string{name})
				must(t, err)
				count := 0
				for _, table := range tables(t, p, family) {
					count += s.Protection().Extract(table, func(rules.Rule) bool { return false }).RuleCount()
				}
				if want := strings.Count(part.Text, "\n-A ") + strings.Count(part.Text, "\n-I "); count != want {
					t.Errorf("the preset %s protects %d of its owner's %d rules in %s", name, count, want, family)
				}
			}
		}
	})
}

// TestScenariosTakeWhatTheySay runs every scenario without a canaryd.
func TestScenariosTakeWhatTheySay(t *testing.T) {
	onEach(t, func(t *testing.T, p Flusher) {
		for _, s := range All() {
			if !s.On(p.Backend()) {
				continue
			}
			t.Run(s.Name, func(t *testing.T) {
				must(t, Wipe(t.Context(), p, rules.Families()...))
				must(t, Load(t.Context(), p, rules.Families()...))
				if s.Prepare != nil {
					must(t, s.Prepare(t.Context(), p))
				}
				before := map[rules.Family]rules.Ruleset{}
				for _, family := range rules.Families() {
					before[family] = tables(t, p, family)
				}
				must(t, s.Do(t.Context(), p))
				for _, family := range rules.Families() {
					after := tables(t, p, family)
					for _, table := range protect.Always() {
						if got, want := shows(t, before[family][table], after[table]), s.Lost[family.Table(table)]; !slices.Contains(got, want) {
							t.Errorf("%s %s looks %q, want %q", family, table, got, want)
						}
					}
				}
			})
		}
	})
}

// shows returns the verdicts that a table's state allows. "" is no loss.
func shows(t *testing.T, before, after *rules.Table) []string {
	t.Helper()
	if after == nil {
		return []string{TableDeleted}
	}
	protects := selector(t).Protects
	var missing, emptied, full int
	for _, chain := range before.Chains {
		if !protects(chain.Name) {
			continue
		}
		switch now := after.Chain(chain.Name); {
		case now == nil:
			missing++
		case len(chain.Rules) == 0: // says nothing
		case len(now.Rules) == 0:
			emptied++
		default:
			full++
		}
	}
	diff := Compare(Want{
		Protected: rules.Ruleset{before.Name: before}, Foreign: rules.Ruleset{after.Name: after}, Protects: protects,
	}, rules.Ruleset{after.Name: after})
	switch {
	case missing > 0 && full > 0:
		return []string{Replaced}
	case missing > 0:
		return []string{ChainDeleted}
	case emptied > 0:
		return []string{Emptied}
	case len(diff) > 0:
		return []string{JumpsMissing}
	case before.Name == rules.Mangle && after.RuleCount() == 0:
		return []string{"", Emptied} // it has one empty chain of the saved file; only a canary could show the flush
	default:
		return []string{""}
	}
}

// onEach runs body on the Fake and on the kernel, for both backends.
func onEach(t *testing.T, body func(t *testing.T, f Flusher)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend)+" fake", func(t *testing.T) {
			body(t, FakePrograms{iptablestest.NewFake(backend)})
		})
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
				body(t, Programs{With: backend})
			})
		})
	}
}

func tables(t *testing.T, f Flusher, family rules.Family) rules.Ruleset {
	t.Helper()
	set, err := Tables(t.Context(), f, family)
	must(t, err)
	return set
}

func selector(t *testing.T) protect.Selector {
	t.Helper()
	s, err := protect.NewSelector(Protect)
	must(t, err)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
