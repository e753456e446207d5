package iptables_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestEachExtensionComesBack: a flush takes each rule of each match and target
// that the kernel accepts. It must come back with the same bytes, or be named
// when canaryd learns it. CANARYD_CORPUS says how many times each line of the
// corpus is drawn. On nft a table is written by its bytes if no rule names an
// ipset, otherwise as text.
func TestEachExtensionComesBack(t *testing.T) {
	seed, draws := iptables.DirectSeed(t), 1
	if text := os.Getenv("CANARYD_CORPUS"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		draws = n
	}
	iptables.OnBoth(t, func(t *testing.T, backend iptables.Backend, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		nstest.Command(t, "ipset", "create", "plain", "hash:ip", "family", inet, "timeout", "0", "counters", "skbinfo")
		for round := range draws {
			all := corpusRules(rand.New(rand.NewPCG(seed+uint64(round), uint64(family))), family)
			if backend == iptables.Legacy {
				flushAndHeal(t, legacy, family, all)
				continue
			}
			refused := flushAndHeal(t, asText, family, all)
			for table, list := range all {
				all[table] = slices.DeleteFunc(list, func(args string) bool { return namesANumber(args) || refused[table+" "+args] != nil })
			}
			flushAndHeal(t, byBytes, family, all)
		}
	})
}

// namesANumber reports whether a rule's bytes contain a number of the kernel's,
// or a program.
func namesANumber(args string) bool {
	return regexp.MustCompile(`-m (set|bpf)|-j SET`).MatchString(args)
}

// flushAndHeal loads rules, flushes them, puts them back, and compares. It
// returns the refused rules, by table and rule.
func flushAndHeal(t *testing.T, as way, family rules.Family, all map[rules.TableName][]string) map[string]error {
	t.Helper()
	s := corpusStage{backend: iptables.NFT, way: as, family: family, rules: map[iptables.Place]string{}, refused: map[string]error{}}
	if as == legacy {
		s.backend = iptables.Legacy
	}
	s.flush(t)
	for _, table := range protect.Always() {
		s.load(t, table, all[table])
	}
	s.flushAndHeal(t)
	return s.refused
}

// A corpusStage is a namespace with rules of the corpus, each in a chain of its own.
type corpusStage struct {
	backend iptables.Backend
	way     way
	family  rules.Family
	rules   map[iptables.Place]string // as they were written
	refused map[string]error          // by table and rule
	named   int                       // chains
}

// load writes the rules that this machine takes.
func (s *corpusStage) load(t *testing.T, table rules.TableName, all []string) {
	t.Helper()
	s.restore(t, fmt.Sprintf("*%s\n:GOAL - [0:0]\nCOMMIT\n", table))
	s.loadEstimator(t)
	for chunk := range slices.Chunk(all, 64) {
		s.loadSome(t, table, chunk)
	}
}

// loadEstimator writes the rule that rules with the match rateest need.
func (s *corpusStage) loadEstimator(t *testing.T) {
	t.Helper()
	s.restore(t, "*mangle\n:KNOWN - [0:0]\n-A KNOWN -j RATEEST --rateest-name known --rateest-interval 1s --rateest-ewmalog 8s\nCOMMIT\n")
}

// flush removes all rules and chains of all tables, as a restore of an empty file does.
func (s *corpusStage) flush(t *testing.T) {
	t.Helper()
	var empty strings.Builder
	for _, table := range protect.Always() {
		fmt.Fprintf(&empty, "*%s\nCOMMIT\n", table)
	}
	nstest.CommandInput(t, empty.String(), iptables.Program(s.backend, s.family, "-restore"), "-w", "5")
}

// restore feeds lines to iptables-restore, and returns the reason of a refusal.
func (s *corpusStage) restore(t *testing.T, text string) error {
	t.Helper()
	_, err := iptables.TryTool(t, text, iptables.Program(s.backend, s.family, "-restore"), "--noflush", "-w", "5")
	return err
}

// loadSome writes rules by one restore, without refused ones.
func (s *corpusStage) loadSome(t *testing.T, table rules.TableName, some []string) {
	t.Helper()
	for len(some) > 0 {
		var declared, added strings.Builder
		var places []iptables.Place
		for _, args := range some {
			s.named++
			p := iptables.Place{Table: table, Chain: fmt.Sprintf("CORPUS-%d", s.named)}
			fmt.Fprintf(&declared, ":%s - [0:0]\n", p.Chain)
			fmt.Fprintf(&added, "-A %s %s\n", p.Chain, args)
			places = append(places, p)
		}
		err := s.restore(t, fmt.Sprintf("*%s\n%s%sCOMMIT\n", table, &declared, &added))
		refused := map[int]error{}
		for _, line := range iptables.NamedLines(err) { // none if there is no error
			if i := line - 1 - len(some); i >= 0 && i < len(some) {
				refused[i] = err
			}
		}
		if err != nil && len(some) == 1 {
			refused[0] = err
		} else if err != nil && len(refused) == 0 { // iptables-legacy does not name the refused rule
			s.loadSome(t, table, some[:len(some)/2])
			some = some[len(some)/2:]
			continue
		}
		var taken []string
		for i, args := range some {
			switch err := refused[i]; {
			case err != nil:
				s.refused[table+" "+args] = err
			case err == nil && len(refused) == 0:
				s.rules[places[i]] = args
			default:
				taken = append(taken, args)
			}
		}
		some = taken
	}
}

func lastLine(err error) string {
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return lines[len(lines)-1]
}

// flushAndHeal learns the present rules, flushes them, puts them back, and
// compares bytes.
func (s *corpusStage) flushAndHeal(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	k := iptables.OpenKernel(t, iptables.Config{Backend: s.backend, Families: []rules.Family{s.family}})
	selector, err := protect.NewSelector([]string{"CORPUS-*", "GOAL"})
	if err != nil {
		t.Fatal(err)
	}
	snapshot, err := k.Read(ctx, s.family)
	if err != nil {
		t.Fatal(err)
	}
	job := reload.Job{Families: []rules.Family{s.family}, Generation: rules.Generation{}}
	for name, table := range snapshot.Tables {
		job.Generation = job.Generation.With(s.family.Table(name), selector.Protection().Extract(table, canary.IsMark))
	}
	before := iptables.RuleBytes(t, s.backend, s.family, snapshot.Tables)

	replayer := reload.Replayer{Kernel: k, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: selector.Protects}}
	result, err := replayer.Plant(ctx, job)
	if err != nil {
		t.Fatal(err)
	}
	for name, table := range result[s.family].Tables {
		job.Marks = job.Marks.With(s.family.Table(name), table.Mark)
	}
	s.flush(t)
	s.loadEstimator(t) // as its owner does
	result, err = replayer.Heal(ctx, job)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %s: %v; as text: %v", s.way, result[s.family].Outcome, result[s.family].Err, result[s.family].Detour)

	after := iptables.RuleBytes(t, s.backend, s.family, snapshot.Tables)
	count := map[string]int{}
	for place, args := range s.rules {
		rule := snapshot.Tables[place.Table].Chain(place.Chain).Rules[0]
		reason, opaque := rule.Opaque()
		became, text := "same", ""
		switch {
		case len(before[place]) != 1:
			t.Fatalf("%v %q has %d rules", place, args, len(before[place]))
		case opaque && len(after[place]) == 0:
			became = "named"
			t.Logf("named: -t %s %s: %s", place.Table, args, reason)
		case len(after[place]) != 1:
			became = "lost"
		case after[place][0] != before[place][0]:
			became, text = "another", bytesApart(before[place][0], after[place][0])
		}
		count[became]++
		if became == "lost" || became == "another" {
			t.Errorf("%s, %s: -t %s %s\nread as %s%s", s.way, became, place.Table, args, rule.Spec, text)
		}
	}
	t.Logf("%v; %d refused by this machine", count, len(s.refused))
	if count["same"] < len(s.rules)*9/10 || len(s.rules) < 10*len(s.refused) {
		t.Errorf("of %d rules %v, and %d are refused", len(s.rules), count, len(s.refused))
	}
	for rule, err := range s.refused {
		t.Logf("refused: -t %s: %s", rule, lastLine(err))
	}
}

// bytesApart shows the first difference of two rules.
func bytesApart(a, b string) string {
	text := fmt.Sprintf("\n%d and %d bytes", len(a), len(b))
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			text += fmt.Sprintf(", at %d %#x is %#x", i, a[i], b[i])
		}
	}
	return text
}
