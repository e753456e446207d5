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

// TestEveryPresetIsTried: a test has rules of the real owner of each word of --protect.
func TestEveryPresetIsTried(t *testing.T) {
	tried := slices.Concat(scenario.Protect, scenario.Owners(), scenario.NativeOwners())
	for _, name := range scenario.TableOwners() {
		tried = append(tried, scenario.Preset(name))
	}
	slices.Sort(tried)
	tried = slices.Compact(tried)
	words := protect.PresetNames()
	slices.Sort(words)
	if d := cmp.Diff(words, tried); d != "" {
		t.Errorf("presets (-named +tried):\n%s", d)
	}
}

// TestOwnersOfTheTableGetTheirRulesBack: the preset names all rules of its owner. After a flush
// of each kind they are back, next to those of others, each once and in its place. The last
// kind is a file from before the owner wrote its rules.
func TestOwnersOfTheTableGetTheirRulesBack(t *testing.T) {
	kinds := []string{"flush-all", "flush-delete-all", "flush-delete-nat", "flush-forward", "flush-prerouting", "flush-postrouting", "restore-filter", "nft-flush-ruleset", "restore-saved"}
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, name := range scenario.TableOwners() {
			for _, s := range append(scenario.All(), scenario.RestoreSaved()) {
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
		if s.Prepare != nil { // before the owner writes its rules
			must(t, s.Prepare(t.Context(), scenario.FakePrograms{Fake: fake}))
		}
		loadOwner(t, fake, name)
		return fake
	}
	control := &rig{t: t, fake: node()}
	must(t, s.Do(t.Context(), control.programs()))
	foreign := control.tables()

	r := run(t, node(), setup{protect: append([]string{scenario.Preset(name)}, scenario.Owners()...)})
	r.settled()
	before := r.tables()
	must(t, s.Do(t.Context(), r.programs()))
	r.settled()
	r.wantBack(before, foreign)
}

// TestAnOwnerSyncsAroundAReplay: an owner looks for its rules and writes the missing ones,
// right after the flush or right after the replay. All rules are back, and none is doubled.
func TestAnOwnerSyncsAroundAReplay(t *testing.T) {
	eachOwner(t, func(t *testing.T, r *rig, part scenario.Part) {
		before := r.tables()
		for _, first := range []bool{true, false} {
			must(t, scenario.All()[0].Do(t.Context(), r.programs()))
			if !first {
				r.settled()
			}
			r.syncOwner(part)
			r.settled()
			r.after(2 * r.d.cfg.JumpGrace)
			for table, set := range r.tables()[rules.IPv4] {
				for _, c := range set.Chains {
					for _, rule := range c.Rules {
						wanted := func(r rules.Rule) bool { return r.Equal(rule) }
						if is, was := count(c.Rules, wanted), count(before[rules.IPv4][table].Rules(c.Name), wanted); is > was && !strings.Contains(rule.Spec, "canaryd-") {
							t.Errorf("%s %s has %s %d times, and had it %d times", table, c.Name, rule.Spec, is, was)
						}
					}
				}
			}
			for _, line := range lacking(before[rules.IPv4], r.tables()[rules.IPv4], part) {
				t.Errorf("%s is missing", line)
			}
		}
	})
}

// TestAnOwnersRemovalIsObeyed: an owner that leaves the node deletes its rules in built-in chains
// by name, and then its chains. Neither the grace nor a flush brings any of them back.
func TestAnOwnersRemovalIsObeyed(t *testing.T) {
	eachOwner(t, func(t *testing.T, r *rig, part scenario.Part) {
		tables := r.tables()[rules.IPv4]
		r.removeOwner(part)
		r.settled()
		r.after(2 * r.d.cfg.JumpGrace)
		r.wantNoFlush()
		must(t, scenario.All()[0].Do(t.Context(), r.programs()))
		r.settled()
		r.after(2 * r.d.cfg.JumpGrace)
		own := lacking(tables, r.tables()[rules.IPv4], part)
		if want := strings.Count(part.Text, "\n-A ") + strings.Count(part.Text, "\n-I "); len(own) != want {
			t.Errorf("of %d rules %d stayed away: %q", want, len(own), own)
		}
	})
}

// eachOwner runs a test for each owner of the table, on each backend.
func eachOwner(t *testing.T, test func(t *testing.T, r *rig, part scenario.Part)) {
	for _, name := range scenario.TableOwners() {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				fake := ownersFake(t, backend)
				part := loadOwner(t, fake, name)
				r := run(t, fake, setup{protect: append([]string{scenario.Preset(name)}, scenario.Owners()...)})
				r.settled()
				test(t, r, part)
			})
		})
	}
}

// lacking returns the owner's rules that was has and tables lacks.
func lacking(was, tables rules.Ruleset, part scenario.Part) (list []string) {
	eachLine(part, func(table rules.TableName, line string) {
		chain, rule, is := ownersRule(line)
		if is && (!slices.ContainsFunc(was[table].Rules(chain), rule.Equal) || !slices.ContainsFunc(tables[table].Rules(chain), rule.Equal)) {
			list = append(list, string(table)+" "+line)
		}
	})
	return list
}

// eachLine calls do with each line of an owner's rules, and its table.
func eachLine(part scenario.Part, do func(table rules.TableName, line string)) {
	table := ""
	for line := range strings.Lines(part.Text) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "*") {
			table = line[1:]
		}
		do(rules.TableName(table), line)
	}
}

// ownersRule returns the rule that a line appends or inserts first.
func ownersRule(line string) (chain string, r rules.Rule, is bool) {
	if !strings.HasPrefix(line, "-") {
		return "", rules.Rule{}, false
	}
	chain, spec, _ := strings.Cut(line[len("-A "):], " ")
	r, err := rules.ParseRule(strings.TrimPrefix(spec, "1 "))
	return chain, r, err == nil
}

// syncOwner declares the owner's chains and fills them, and inserts or appends the rules that
// built-in chains lack.
func (r *rig) syncOwner(part scenario.Part) {
	r.t.Helper()
	tables, text := r.tables()[rules.IPv4], ""
	eachLine(part, func(table rules.TableName, line string) {
		chain, rule, is := ownersRule(line)
		if !is || !rules.Builtin(table, chain) || !slices.ContainsFunc(tables[table].Rules(chain), rule.Equal) {
			text += line + "\n"
		}
	})
	must(r.t, r.fake.RestoreNoflush(rules.IPv4, text))
}

// removeOwner deletes the owner's rules in built-in chains, empties its chains, and deletes them.
func (r *rig) removeOwner(part scenario.Part) {
	r.t.Helper()
	var byName, empty, gone string
	eachLine(part, func(table rules.TableName, line string) {
		chain, rule, is := ownersRule(line)
		switch {
		case is && rules.Builtin(table, chain):
			byName += "-D " + chain + " " + rule.Spec + "\n"
		case is:
		case line[0] == ':':
			empty += line + "\n"
			gone += "-X " + strings.Fields(line[1:])[0] + "\n"
		default:
			byName, empty, gone = byName+line+"\n", empty+line+"\n", gone+line+"\n"
		}
	})
	for _, text := range []string{byName, empty, gone} {
		must(r.t, r.fake.RestoreNoflush(rules.IPv4, text))
	}
}

func count(list []rules.Rule, is func(rules.Rule) bool) (n int) {
	for _, r := range list {
		if is(r) {
			n++
		}
	}
	return n
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

// TestAPresetNamesAllOfItsOwnersRules: the preset omits no rule of its owner.
func TestAPresetNamesAllOfItsOwnersRules(t *testing.T) {
	for _, name := range scenario.TableOwners() {
		fake := iptablestest.NewFake(iptables.NFT)
		part := loadOwner(t, fake, name)
		s, err := protect.NewSelector([]string{scenario.Preset(name)})
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
