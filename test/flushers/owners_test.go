package flushers

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// An owner is a program of the distribution that writes rules for good.
type owner struct {
	name, preset    string
	unpacked, needs []string
	built           string // by hack/owners.sh
	install         func(m *machine)
	// start and stop return once the rules exist, or are gone.
	start, stop func(m *machine)
	// adds makes the program write one more rule for the host of that number; nil: it writes
	// all of its rules at its start.
	adds func(m *machine, host int)
	// restarts is a restart; nil: stop and start.
	restarts func(m *machine)
	// syncs makes it write its rules again, or look for them; nil: only a restart does.
	syncs func(m *machine)
	// watches says that it looks for its rules all the time. It may miss a rule before a replay
	// and write it afterwards. The rule is then doubled: a jump until --jump-grace is over, a
	// rule of its chains until it writes the chain again (docs/guarantees.md).
	watches bool
}

func programs() []owner {
	return []owner{fail2banOwner(), crowdsecOwner("iptables"), crowdsecOwner("nftables"), flannelOwner("iptables"), flannelOwner("nftables")}
}

func fail2banOwner() owner {
	var f fail2ban
	return owner{
		name: "fail2ban", preset: "fail2ban", unpacked: fail2banFiles, needs: []string{"/usr/bin/python3"},
		install: f.install, start: f.start, stop: f.stop, adds: f.ban,
		syncs: func(m *machine) { m.run("fail2ban-client", "reload") },
	}
}

// TestProgramsOfTheDistributionGetTheirRulesBack: a program that writes rules for good runs
// next to canaryd, which finds it by itself. Its rules come back after each kind of flush. One
// more rule, or a restart, right after a flush or a replay leaves no rule doubled. Rules that
// it removes at its end stay away.
func TestProgramsOfTheDistributionGetTheirRulesBack(t *testing.T) {
	for _, o := range programs() {
		backends := both
		if strings.HasSuffix(o.name, "nftables") {
			backends = onlyNFT
		}
		for _, backend := range backends {
			t.Run(o.name+"/"+string(backend), func(t *testing.T) {
				nodetest.On(t, backend, func(n *nodetest.Node) {
					if o.built != "" {
						nstest.NeedFile(n.T, o.built)
					}
					own(machineOf(n, flusher{unpacked: o.unpacked, needs: o.needs}), o)
				})
			})
		}
	}
}

// own takes an owner from its start to its end.
func own(m *machine, o owner) {
	m.Helper()
	for _, row := range owners.Named(o.preset) {
		if row.TriedWith() != owners.ByProgram {
			m.Errorf("the table of owners says of %s that tests flush rules from %s", row.Name, row.TriedWith())
		}
	}
	m.reset()
	o.install(m)
	m.Load()
	saved := scenario.RestoreSaved()
	m.Must(saved.Prepare(m.Context(), m.Programs))
	o.start(m)
	add := func(host int) {
		if o.adds != nil {
			o.adds(m, host)
		}
	}
	add(1)
	add(2)
	d := m.Start("--jump-grace=2s")
	m.Until("the owner to be found", func() error {
		if stdout, _ := m.Want(0, "status"); !strings.Contains(stdout, o.preset+" (") {
			return fmt.Errorf("status does not name it:\n%s", stdout)
		}
		return nil
	})
	m.Renewed()

	whole := slices.Compact(ownRules(m, o))
	back := func(kind string, lose func()) {
		m.Helper()
		if o.watches { // it may be about to delete its rules and write them again
			m.Until(kind+": its rules to be as they were", func() error { return same(m, o, whole) })
		}
		before, records := ownRules(m, o), len(m.Status().Flushes)
		lose()
		m.Healed(records + 1)
		if o.watches {
			m.Until(kind+": its rules to be back, and no jump twice", func() error { return errors.Join(same(m, o, whole), twice(m, o)) })
		} else {
			m.Same(kind+": the rules of "+o.preset, before, ownRules(m, o))
		}
		if m.Failed() {
			m.Fatalf("this was the log:\n%s", d.Log())
		}
	}
	kinds := []string{"flush-all", "flush-delete-all", "flush-forward", "restore-filter", "flush-ipv6", "nft-flush-ruleset", "restore-saved"}
	for _, s := range append(scenario.All(), saved) {
		if s.On(m.Programs.With) && slices.Contains(kinds, s.Name) {
			back(s.Command, func() { m.Must(s.Do(m.Context(), m.Programs)) })
		}
	}
	flush := func() { m.Must(scenario.All()[0].Do(m.Context(), m.Programs)) }

	add(3)
	m.Renewed()
	back("a flush after another rule", flush)
	add(4) // right after the replay
	once(m, o, "another rule behind a replay")
	m.Renewed()
	records := len(m.Status().Flushes)
	flush()
	add(5) // right after the flush: it may repair its own rules first
	m.Healed(records + 1)
	m.Learned()
	once(m, o, "another rule behind a flush")

	if o.syncs != nil {
		back("a flush before a sync", flush)
		before := ownRules(m, o)
		o.syncs(m)
		m.Learned()
		once(m, o, "a sync behind a replay")
		m.Same("a sync behind a replay", slices.Compact(before), slices.Compact(ownRules(m, o)))
	}
	back("a flush before a restart", flush)
	if o.restarts != nil {
		o.restarts(m)
	} else {
		o.stop(m)
		o.start(m)
	}
	add(1)
	once(m, o, "a restart behind a replay")
	m.Renewed()
	back("a flush after a restart", flush)

	o.stop(m)
	m.Learned()
	gone := func(when string) {
		m.Helper()
		if left := ownRules(m, o); len(left) > 0 {
			m.Errorf("%s, rules of %s are there:\n%s", when, o.preset, strings.Join(left, "\n"))
		}
	}
	gone("after its end")
	records = len(m.Status().Flushes)
	m.Must(scenario.All()[1].Do(m.Context(), m.Programs))
	m.Healed(records + 1)
	gone("after its end and a flush")
	m.Want(0, "check")
	d.Stop()
}

// once fails the test if a rule of the owner is doubled. A jump of an owner that watches may be
// doubled until --jump-grace is over.
func once(m *machine, o owner, when string) {
	m.Helper()
	if o.watches {
		m.Until(when+": no jump to be there twice", func() error { return twice(m, o) })
	} else if err := twice(m, o); err != nil {
		m.Errorf("%s: %v", when, err)
	}
}

// same returns an error with the differences of the owner's rules from these, each counted
// once.
func same(m *machine, o owner, want []string) error {
	m.Helper()
	if d := cmp.Diff(want, slices.Compact(ownRules(m, o))); d != "" {
		return fmt.Errorf("the rules of %s (-want +got):\n%s", o.preset, d)
	}
	return nil
}

// twice returns an error with a doubled rule of the owner.
func twice(m *machine, o owner) error {
	m.Helper()
	lines := ownRules(m, o)
	for i := range len(lines) - 1 {
		if lines[i] == lines[i+1] && !(o.watches && !strings.Contains(lines[i], " -A ")) {
			return fmt.Errorf("this rule is there twice: %s", lines[i])
		}
	}
	return nil
}

// ownRules returns the rules of the owner's preset, sorted, and the lines of its native tables.
func ownRules(m *machine, o owner) []string {
	m.Helper()
	selector, err := protect.NewSelector([]string{o.preset})
	m.Must(err)
	p := selector.Protection()
	var lines []string
	for family, set := range m.Save() {
		for table, content := range set {
			where := family.String() + " " + string(table) + " "
			section := p.Extract(content, canary.IsMark)
			for _, h := range section.Jumps {
				lines = append(lines, where+h.String())
			}
			for _, c := range section.Chains {
				lines = append(lines, where+c.Name)
				for _, r := range c.Rules {
					lines = append(lines, where+c.Name+" "+r.Spec)
				}
			}
		}
	}
	slices.Sort(lines)
	for line := range strings.Lines(nstest.Command(m.T, "nft", "list", "tables")) {
		words := strings.Fields(line) // table ip crowdsec
		family, known := tableid.FamilyOfNFT(words[1])
		if !known || !selector.ProtectsTable(tableid.TableID{Family: family, Name: words[2]}) {
			continue
		}
		text := nstest.Command(m.T, "nft", "-s", "list", "table", words[1], words[2])
		lines = append(lines, strings.Split(expires.ReplaceAllString(text, ""), "\n")...)
	}
	return lines
}

// expires matches the remaining time of a set's element.
var expires = regexp.MustCompile(` expires [0-9a-z]+`)
