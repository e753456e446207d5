package owners

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The tests run canaryd as it is shipped. The race detector, which test/e2e uses,
// makes a read of 60,000 rules take ten times as long, and commits are farther
// apart.
func TestMain(m *testing.M) {
	// Most tests wait for graces and for the commands of a flusher.
	if err := flag.Set("test.parallel", "5"); err != nil {
		panic(err)
	}
	os.Exit(nodetest.MainWithTurns(m))
}

// A story is a course of events on a node while canaryd watches.
type story struct {
	name     string
	backends []iptables.Backend // empty: both
	flags    []string           // of canaryd run
	protect  []string           // words of --protect besides the presets
	busy     bool               // it needs the processor more than time
	same     bool               // make test-large has no larger one, so only make test runs it
	// prepare writes the node's rules. It returns the rules that must be left in
	// the end, without canaryd's; nil if the story checks that. Without prepare
	// the rules are those of Node.Load, and all must be left. prepare may change
	// the story, such as canaryd's flags, according to the machine's speed.
	prepare func(n *nodetest.Node, s *story) (left []string)
	// happens is the story itself. canaryd is ready when it begins, and must be
	// ready again a moment after it.
	happens func(n *nodetest.Node, d *nodetest.Process)
	quiet   time.Duration // how long canaryd polls afterwards, each second; at least moment
	want    counts
}

// counts are canaryd's counters: replays by their result, flushed tables, and
// flush records.
type counts struct{ Proved, Raced, Partial, Failed, Skipped, Tables, Records int }

// moment is long enough for the looks after a hint and for two polls.
const moment = 3 * time.Second

// polled waits until canaryd has polled for that long, each second.
func polled(n *nodetest.Node, long time.Duration) {
	n.Helper()
	n.Polled(int(long/time.Second) + 1) // the first poll may be immediate
}

var (
	// jumpGrace is canaryd's --jump-grace. After grace canaryd has also learned.
	jumpGrace = testkit.Size(6*time.Second, 15*time.Second)
	grace     = jumpGrace + 3*time.Second
)

var both = []iptables.Backend{iptables.NFT, iptables.Legacy}

// TestNeverAFalseFlush plays all stories at the same time, however few processors
// there are, because most stories mostly wait. Busy stories take turns.
func TestNeverAFalseFlush(t *testing.T) {
	t.Parallel()
	var all sync.WaitGroup
	defer all.Wait()
	for _, s := range stories() {
		backends := s.backends
		if len(backends) == 0 {
			backends = both
		}
		for _, backend := range backends {
			all.Go(func() {
				t.Run(s.name+"/"+string(backend), func(t *testing.T) {
					nodetest.In(t, backend, func(n *nodetest.Node) { tell(n, s) })
				})
			})
		}
	}
}

func stories() []story {
	all := slices.Concat(ownersStories(), strangersStories(), troubleStories(), flushStories())
	return slices.DeleteFunc(all, func(s story) bool { return s.same && testkit.IsLarge() })
}

// tell plays one story and compares canaryd's counts with the wanted counts.
func tell(n *nodetest.Node, s story) {
	if s.prepare == nil {
		s.prepare = func(n *nodetest.Node, _ *story) []string { n.Load(); return everything(n) }
	}
	selector, err := protect.NewSelector(append(slices.Clone(scenario.Protect), s.protect...))
	n.Must(err)
	n.Protects = selector.Protects
	done := func() {}
	if s.busy {
		done = n.Turn()
	}
	left := s.prepare(n, &s)
	flags := append([]string{"--jump-grace=" + jumpGrace.String(), "--protect=" + strings.Join(append(slices.Clone(scenario.Protect), s.protect...), ",")}, s.flags...)
	d := n.Start(flags...)
	n.Renewed()
	before := count(n)

	s.happens(n, d)
	done()
	polled(n, max(s.quiet, moment))
	n.Until("canaryd to know the last changes of the owners", func() error {
		if lines := stale(n); len(lines) > 0 {
			return fmt.Errorf("%d differences:\n%s", len(lines), strings.Join(lines[:min(len(lines), 20)], "\n"))
		}
		return nodetest.Ready()
	})
	got := count(n).minus(before)
	if diff := cmp.Diff(s.want, got); diff != "" {
		n.Errorf("replays and flushes (-want +got):\n%s", diff)
	}
	if left != nil {
		n.Same("all rules but canaryd's", left, everything(n))
	}
	n.Want(0, "check")
	n.Logf("seen: %s", got)
	d.Stop()
}

// count returns canaryd's present counts.
func count(n *nodetest.Node) counts {
	n.Helper()
	samples := n.Metrics()
	replays := func(result string) int {
		return int(nodetest.Sum(samples, "replays_total{", fmt.Sprintf("result=%q", result)))
	}
	return counts{
		Proved: replays("proved"), Raced: replays("raced"), Partial: replays("partial"),
		Failed: replays("failed"), Skipped: replays("skipped"),
		Tables:  int(nodetest.Sum(samples, "flushes_total{")),
		Records: int(nodetest.Sum(samples, "flush_events_total{")),
	}
}

func (c counts) minus(o counts) counts {
	return counts{
		c.Proved - o.Proved, c.Raced - o.Raced, c.Partial - o.Partial, c.Failed - o.Failed, c.Skipped - o.Skipped,
		c.Tables - o.Tables, c.Records - o.Records,
	}
}

// String returns the numbers in the form of a closing note.
func (c counts) String() string {
	return fmt.Sprintf("%d replays (proved %d, raced %d, partial %d, failed %d, skipped %d), %d flushed tables, %d flush records",
		c.Proved+c.Raced+c.Partial+c.Failed+c.Skipped, c.Proved, c.Raced, c.Partial, c.Failed, c.Skipped, c.Tables, c.Records)
}

// stale returns the differences between the generation that canaryd would put
// back and the tables.
func stale(n *nodetest.Node) []string {
	n.Helper()
	var lines []string
	for family, tables := range n.Save() {
		text, _ := n.Want(0, "render", "--ip-family="+family.String())
		rendered := savefile.Tables(n, withBuiltins(text))
		for name, table := range tables {
			if !slices.Contains(protect.Always(), name) {
				continue
			}
			held := rules.Protection{Chain: n.Protects}.Extract(table, canary.IsMark)
			var known rules.Section
			if t := rendered[name]; t != nil {
				known = rules.Protection{Chain: n.Protects}.Extract(t, canary.IsMark)
			}
			for _, line := range rules.Diff(held, known).Lines() {
				lines = append(lines, fmt.Sprintf("%s %s %s", family, name, line))
			}
		}
	}
	return lines
}

// withBuiltins adds the declarations of built-in chains as iptables-save prints
// them, because render leaves them out.
func withBuiltins(text string) string {
	for _, table := range protect.Always() {
		head := "*" + string(table) + "\n"
		declared := head
		for _, chain := range rules.BuiltinChains(table) {
			declared += ":" + chain + " - [0:0]\n"
		}
		text = strings.Replace(text, head, declared, 1)
	}
	return text
}
