package flushers

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) {
	nodetest.SideBySide()
	os.Exit(prepared(m))
}

const (
	// quiet is the time without events after which a step is at its end. A flusher of many
	// commands leaves several flush records.
	quiet = 1200 * time.Millisecond
	// turns is the number of machines that take their steps at the same time. With too many,
	// the measurements mean nothing.
	turns = 6
)

// A flusher is a program that writes firewall rules, with its configuration.
type flusher struct {
	name string
	// unpacked are its files that hack/install-deps.sh unpacks. needs are files of the machine
	// that it needs.
	unpacked, needs []string
	// standby makes the test try it with the standby too.
	standby bool
	// install writes its configuration and starts its lasting processes. That precedes the
	// rules of any other program, as at a machine's start.
	install func(m *machine)
	flags   []string // of canaryd run
	steps   []step
}

// A step is an operator's action with a flusher.
type step struct {
	name string
	// owners runs before the step, as the owners of protected rules; nil: nothing.
	owners func(m *machine)
	does   func(m *machine)
	// loses are the backends on which protected rules get lost, and of the families with a
	// loss; nil: both.
	loses []iptables.Backend
	of    []rules.Family
	// late says where a flusher still puts rules after canaryd's replay. The place of jumps is
	// never corrected.
	late lateness
	// numbered is the target of rules that a flusher inserts by number. Their place is another
	// one if canaryd's replay preceded them.
	numbered string
	// random matches names of empty chains that differ each time.
	random *regexp.Regexp
}

// oneFlush are the flags for flushers that run -F and -X as separate commands. A replay in
// between makes -X fail, and some scripts end there; on a busy machine that would happen.
// netfilter-persistent tries to set the policy of each chain of Kubernetes before its next -F.
// For that 500 ms were not enough at a load of 17.
var oneFlush = []string{"--settle=2s"}

// A lateness is a flusher's place for rules after a replay.
type lateness int

const (
	inTime lateness = iota
	appends
	inserts
	anywhere // by number too
)

var (
	both    = []iptables.Backend{iptables.NFT, iptables.Legacy}
	onlyNFT = both[:1]
)

func flushers() []flusher {
	return slices.Concat(firewalldFlushers(), scriptFlushers(), shorewallFlushers(), ufwFlushers(), savedFlushers(), fail2banFlushers())
}

// TestFlushers runs the flushers, each in a node of its own. Several run at a time on any
// number of processors, because they wait much. The slowest begin.
func TestFlushers(t *testing.T) {
	var all sync.WaitGroup
	defer all.Wait()
	turn := make(chan struct{}, turns)
	for _, f := range flushers() {
		for _, backend := range both {
			turn <- struct{}{}
			all.Go(func() {
				defer func() { <-turn }()
				t.Run(f.name+"/"+string(backend), func(t *testing.T) {
					nodetest.In(t, backend, func(n *nodetest.Node) { endure(machineOf(n, f), f) })
				})
			})
		}
	}
}

// A left is the result of a step without canaryd.
type left struct {
	tables  map[rules.Family]rules.Ruleset
	natives []string
}

// endure takes a machine's steps first without canaryd, for their results, and then with it.
func endure(m *machine, f flusher) {
	m.Helper()
	m.reset()
	f.install(m)
	m.Load()
	var control []left
	m.hurry = true
	for _, s := range f.steps {
		if s.owners != nil {
			s.owners(m)
		}
		s.does(m)
		control = append(control, left{m.Save(), m.natives()})
	}

	m.hurry = false
	m.reset()
	f.install(m)
	m.Load()
	d := m.Start(f.flags...)
	testkit.Pass(m, time.Second, "that marks of a new generation are renewed")
	var rows []row
	for i, s := range f.steps {
		if s.owners != nil {
			learn(m, s.owners)
		}
		rows = append(rows, take(m, s, control[i]))
		if m.Failed() {
			m.Fatalf("%s failed; this was the log:\n%s", s.name, d.Log())
		}
	}
	for i := range rows {
		rows[i].Flusher = f.name
	}
	m.Want(0, "check")
	if slices.Contains(f.flags, standby) {
		wasOpen(m)
	}
	handOver(m, rows)
	d.Stop()
}

// learn waits until canaryd has learned the owners' writes.
func learn(m *machine, owners func(m *machine)) {
	m.Helper()
	before := m.Published().Generation.ID
	owners(m)
	m.Until("canaryd to learn what the owners did", func() error {
		if s := m.Published(); s.Generation.ID == before || !s.LearningPendingSince.IsZero() {
			return fmt.Errorf("generation %s, was %s, capture pending since %s", s.Generation.ID, before, s.LearningPendingSince)
		}
		return nodetest.Ready()
	})
	testkit.Pass(m, time.Second, "that marks of a new generation are renewed")
}

// take takes a step while canaryd runs, and judges the result.
func take(m *machine, s step, control left) row {
	m.Helper()
	before, replays := m.Save(), nodetest.Sum(m.Metrics(), "replays_total{")
	marks := shape(before)
	var last time.Time
	if seen := m.Published().Flushes; len(seen) > 0 {
		last = seen[0].Time
	}

	s.does(m)
	records := settled(m, last)
	r := row{Step: s.name, Backend: string(m.Programs.With), Records: records}

	if lost := slices.Contains(s.loses, m.Programs.With); lost != (len(records) > 0) {
		m.Errorf("%s: %d flush records, loss expected: %t", s.name, len(records), lost)
	} else if again := nodetest.Sum(m.Metrics(), "replays_total{"); !lost && again != replays {
		m.Errorf("%s: %v replays although nothing was lost", s.name, again-replays)
	}
	if want := familiesOf(s, m.Programs.With); !slices.Equal(want, hit(records)) {
		m.Errorf("%s: lost of %v, want %v", s.name, hit(records), want)
	}
	for _, rec := range records {
		if rec.Outcome != "proved" && rec.Outcome != "raced" {
			m.Errorf("%s: a flush record says %s", s.name, rec.Outcome)
		}
	}
	after := m.Save()
	m.Same(s.name+": canaryd's own chains and rules", marks, shape(after))
	for _, family := range rules.Families() {
		want, got := without(s.numbered, control.tables[family]), without(s.numbered, after[family])
		m.Same(fmt.Sprintf("%s: %s rules that are inserted by number", s.name, family), want, got)
	}
	for _, family := range rules.Families() {
		want := scenario.Want{Protected: before[family], Foreign: control.tables[family], Late: s.late != inTime, Protects: m.Protects}
		for _, line := range pairedOff(s.random, scenario.Compare(want, after[family])) {
			m.Errorf("%s: %s %s", s.name, family, line)
		}
		judge := func(was, is rules.Ruleset) []string { return misplaced(m, s, was, is) }
		if len(records) == 0 {
			judge = func(was, is rules.Ruleset) []string { return moved(was, is) }
		}
		for _, line := range judge(before[family], after[family]) {
			m.Errorf("%s: %s %s", s.name, family, line)
		}
	}
	if diff := cmp.Diff(control.natives, m.natives()); diff != "" {
		m.Errorf("%s: nft's own tables (-want +got):\n%s", s.name, diff)
	}
	return r
}

// familiesOf returns the families in which a step loses protected rules.
func familiesOf(s step, backend iptables.Backend) []rules.Family {
	switch {
	case !slices.Contains(s.loses, backend):
		return nil
	case s.of != nil:
		return s.of
	default:
		return rules.Families()
	}
}

// hit returns the families with losses in the records.
func hit(records []scenario.Record) []rules.Family {
	var all []rules.Family
	for _, r := range records {
		all = append(all, r.Families...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// settled waits until canaryd rests, and returns the flush records newer than last, oldest
// first.
func settled(m *machine, last time.Time) []scenario.Record {
	m.Helper()
	var records []scenario.Record
	since := time.Now()
	m.Until("canaryd to be at rest", func() error {
		s := m.Published()
		newer := slices.DeleteFunc(s.Flushes, func(r scenario.Record) bool { return !r.Time.After(last) })
		pending := slices.ContainsFunc(newer, scenario.Record.Replaying)
		ready := nodetest.Ready()
		if len(newer) != len(records) || pending || !s.Healthy || !s.LearningPendingSince.IsZero() || ready != nil {
			since = time.Now()
		}
		records = newer
		if time.Since(since) < quiet {
			return fmt.Errorf("%d flush records, pending %t, healthy %t, capture pending since %s, %w", len(newer), pending, s.Healthy, s.LearningPendingSince, ready)
		}
		return nil
	})
	slices.Reverse(records)
	return records
}

var nonce = regexp.MustCompile(`(canaryd-[a-z]+:)[0-9a-f]+`)

// shape returns canaryd's own chains and rules, each in its chain, without their nonces.
func shape(tables map[rules.Family]rules.Ruleset) []string {
	var lines []string
	for family, set := range tables {
		for name, table := range set {
			for _, c := range table.Chains {
				where := fmt.Sprintf("%s %s %s", family, name, c.Name)
				if c.Name == canary.DefaultChain {
					lines = append(lines, where)
				}
				for _, r := range c.Rules {
					if nonce.MatchString(r.Spec) || c.Name == canary.DefaultChain {
						lines = append(lines, where+" "+nonce.ReplaceAllString(r.Spec, "$1"))
					}
				}
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// pairedOff returns the lines of a comparison, without pairs for a chain with another random
// name.
func pairedOff(random *regexp.Regexp, lines []string) []string {
	if random == nil {
		return lines
	}
	var left []string
	balance := map[string]int{}
	count := func(line string) (key string, by int) {
		key = random.ReplaceAllString(line, "$1*")
		if cut, ok := strings.CutSuffix(key, " is missing"); ok {
			return cut, 1
		}
		return strings.TrimSuffix(key, " is there and should not be"), -1
	}
	for _, line := range lines {
		if random.MatchString(line) {
			key, by := count(line)
			balance[key] += by
		}
	}
	for _, line := range lines {
		if key, _ := count(line); !random.MatchString(line) || balance[key] != 0 {
			left = append(left, line)
		}
	}
	return left
}

// without removes the rules with that target from the built-in chains, and returns them.
func without(target string, tables rules.Ruleset) (taken []string) {
	if target == "" {
		return nil
	}
	for _, table := range protect.Always() {
		for _, name := range rules.BuiltinChains(table) {
			chain := tables[table].Chain(name)
			if chain == nil {
				continue
			}
			chain.Rules = slices.DeleteFunc(chain.Rules, func(r rules.Rule) bool {
				if r.Target == target {
					taken = append(taken, fmt.Sprintf("%s %s %s", table, name, r.Spec))
				}
				return r.Target == target
			})
		}
	}
	return taken
}

// moved lists the built-in chains in which the lasting rules have another order than before.
func moved(before, after rules.Ruleset) []string {
	var lines []string
	for _, table := range protect.Always() {
		for _, name := range rules.BuiltinChains(table) {
			was, is := specs(before[table].Chain(name)), specs(after[table].Chain(name))
			gone := func(list []string) func(string) bool {
				return func(spec string) bool { return !slices.Contains(list, spec) }
			}
			was, is = slices.DeleteFunc(was, gone(is)), slices.DeleteFunc(is, gone(was))
			if diff := cmp.Diff(was, is); diff != "" {
				lines = append(lines, fmt.Sprintf("%s %s (-want +got):\n%s", table, name, diff))
			}
		}
	}
	return lines
}

func specs(chain *rules.Chain) []string {
	if chain == nil {
		return nil
	}
	var all []string
	for _, r := range chain.Rules {
		all = append(all, nonce.ReplaceAllString(r.Spec, "$1"))
	}
	return all
}

// misplaced lists the jumps that are not where a replay puts them. A jump at the top or the
// bottom stays there. Another one is behind its old neighbour, or at the top if that is gone.
func misplaced(m *machine, s step, before, after rules.Ruleset) []string {
	var lines []string
	for _, table := range protect.Always() {
		for _, name := range rules.BuiltinChains(table) {
			was, is := places(m, before[table].Chain(name)), places(m, after[table].Chain(name))
			for spec, w := range was {
				i, ok := is[spec]
				if !ok {
					continue // already reported
				}
				top, bottom := i.above == "", i.below == ""
				switch {
				case w.above == "" && top, w.above != "" && w.below == "" && bottom:
				case w.above != "" && w.below != "" && (top || i.above == w.above):
				case s.late == anywhere:
				case s.late == inserts && bottom: // the chain was empty
				case s.late == appends && w.above != "" && w.below == "":
				default:
					lines = append(lines, fmt.Sprintf("%s %s: this jump stood between %q and %q and stands between %q and %q: %s",
						table, name, w.above, w.below, i.above, i.below, spec))
				}
			}
		}
	}
	return lines
}

// A place has the foreign rules next to a jump; "" is none.
type place struct{ above, below string }

// places returns the place of each jump of a chain.
func places(m *machine, chain *rules.Chain) map[string]place {
	all := map[string]place{}
	if chain == nil {
		return all
	}
	var above string
	var waiting []string
	for _, r := range chain.Rules {
		switch {
		case nonce.MatchString(r.Spec):
		case m.Protects(r.Target):
			all[r.Spec] = place{above: above}
			waiting = append(waiting, r.Spec)
		default:
			for _, spec := range waiting {
				all[spec] = place{all[spec].above, strings.TrimSpace(r.Spec)}
			}
			above, waiting = r.Spec, nil
		}
	}
	return all
}
