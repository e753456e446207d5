package daemon

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestEveryPresetIsTried: each word of --protect has rules of its real owner in a test.
func TestEveryPresetIsTried(t *testing.T) {
	tried := slices.Concat(scenario.Protect, scenario.Owners(), scenario.TableOwners())
	slices.Sort(tried)
	words := protect.PresetNames()
	slices.Sort(words)
	if d := cmp.Diff(words, tried); d != "" {
		t.Errorf("presets (-named +tried):\n%s", d)
	}
}

// TestOwnersOfTheTableGetTheirRulesBack: the preset names all rules of its owner, and after a flush
// of each kind they stand as they did, next to other people's, each once and in its place.
func TestOwnersOfTheTableGetTheirRulesBack(t *testing.T) {
	kinds := []string{"flush-all", "flush-delete-all", "flush-delete-nat", "flush-forward", "flush-prerouting", "flush-postrouting", "restore-filter", "nft-flush-ruleset"}
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, name := range scenario.TableOwners() {
			for _, s := range scenario.All() {
				if s.On(backend) && slices.Contains(kinds, s.Name) {
					t.Run(string(backend)+"/"+name+"/"+s.Name, func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) { tryOwner(t, backend, name, s) })
					})
				}
			}
		}
	}
}

// tryOwner flushes the rules of an owner once.
func tryOwner(t *testing.T, backend iptables.Backend, name string, s scenario.Scenario) {
	node := func() *iptablestest.Fake {
		fake := ownersFake(t, backend)
		loadOwner(t, fake, name)
		return fake
	}
	control := &rig{t: t, fake: node()}
	must(t, s.Do(t.Context(), control.programs()))
	foreign := control.tables()

	r := run(t, node(), setup{protect: append([]string{name}, scenario.Owners()...)})
	r.settled()
	before := r.tables()
	must(t, s.Do(t.Context(), r.programs()))
	r.settled()
	r.wantBack(before, foreign)
}

// loadOwner writes an owner's rules, with the ipsets that they name.
func loadOwner(t *testing.T, fake *iptablestest.Fake, name string) scenario.Part {
	t.Helper()
	part := scenario.Owner(rules.IPv4, name)
	words := strings.Fields(part.Text)
	for i, word := range words {
		if word == "--match-set" {
			fake.Sets().Put(iptables.Set{Name: words[i+1], Create: "hash:ip family inet"})
		}
	}
	must(t, scenario.LoadParts(t.Context(), scenario.FakePrograms{Fake: fake}, rules.IPv4, []scenario.Part{part}))
	return part
}

// TestAPresetNamesAllOfItsOwnersRules: none of the rules that the owner writes is left out.
func TestAPresetNamesAllOfItsOwnersRules(t *testing.T) {
	for _, name := range scenario.TableOwners() {
		fake := iptablestest.NewFake(iptables.NFT)
		part := loadOwner(t, fake, name)
		s, err := protect.NewSelector([]string{name})
		must(t, err)
		count := 0
		for _, table := range fake.Tables(rules.IPv4) {
			count += s.Protection().Extract(table, func(rules.Rule) bool { return false }).RuleCount()
		}
		if want := strings.Count(part.Text, "\n-A ") + strings.Count(part.Text, "\n-I "); count != want {
			t.Errorf("the preset %s protects %d of its owner's %d rules", name, count, want)
		}
	}
}
