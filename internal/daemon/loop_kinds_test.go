package daemon

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A kindNode is a node whose stories are about one kind of table.
type kindNode struct {
	*rig
	k      *fakeNative
	next   func(mode api.Mode) setup // of the next run
	flush  func()                    // another process takes the rules
	missed func()                    // the same; the kernel's messages about native tables are missed
	owner  func()                    // the owner writes the rules again
	refuse func(bool)                // the kernel refuses replays
	blind  func(bool)                // canaryd can read nothing
	change func()                    // the owner changes the rules
	back   func() bool               // whether the rules are in force
	from   int                       // where the story begins in the log
}

// restart ends the run, lets that time pass, and begins the next one.
func (n *kindNode) restart(down time.Duration, mode api.Mode) {
	n.stop()
	time.Sleep(down)
	next := run(n.t, n.fake, n.next(mode))
	*n.rig, n.from = *next, 0
}

// lostForAnHour takes the rules while no canaryd runs, for too long to put them back unasked.
func (n *kindNode) lostForAnHour() {
	n.stop()
	n.missed()
	n.restart(time.Hour, api.Heal)
	n.after(10 * time.Second)
}

// An account is all that canaryd says about a story, in words that do not depend on the kind of
// table.
type account struct {
	Log     []string
	Records []string
	Metrics series
	Back    bool
	Healthy bool
}

// asides are lines about one kind of table that say nothing about the loss and its end.
var asides = []string{
	"Rules that --protect does not name were lost, too", "Some tables may have lost rules that --protect does not name",
	"Commits to nf_tables were missed",
	// A start is not at the same place in the log.
	"Canaries are planted and the generation is captured", "Guarding the rules of", "Took up the stored", "kube-proxy's rules have no owner",
	"The marks of the last run are gone",
}

var (
	sentence = regexp.MustCompile(`\] "([^"]*)"`)
	perTable = regexp.MustCompile(`\{.*?(result=\w+)?\}`)
)

// account returns the words about a story.
func (n *kindNode) account() account {
	t := account{Metrics: series{}, Back: n.back(), Healthy: n.d.Status().Healthy}
	for _, m := range sentence.FindAllStringSubmatch(n.log.String()[n.from:], -1) {
		if !slices.ContainsFunc(asides, func(s string) bool { return strings.HasPrefix(m[1], s) }) {
			t.Log = append(t.Log, m[1])
		}
	}
	t.Log = slices.Compact(t.Log) // each family has a line
	for _, f := range n.records(0) {
		say := []string{string(f.Outcome)}
		for word, is := range map[string]bool{"at most": f.AbsentAtMost, "tried again": f.Attempts > 1, "by a process": f.Culprit.PID != 0,
			"absent": f.AbsentSeconds > 0, "why": f.Detail != "", "repeated": f.Repeated != nil, "earlier": f.Earlier} {
			if is {
				say = append(say, word)
			}
		}
		slices.Sort(say[1:])
		t.Records = append(t.Records, strings.Join(say, ", "))
	}
	for name, v := range n.metrics("flush_events", "rules_absent", "replays_total") {
		if !strings.Contains(name, "result=skipped") { // iptables' tables count families without a loss
			if name = perTable.ReplaceAllString(name, " $1"); strings.HasPrefix(name, "replays") {
				v = 1 // native tables count each table, and iptables' tables each family
			}
			t.Metrics[name] = v
		}
	}
	return t
}

// accountOf runs a story about one kind of table.
func accountOf(t *testing.T, native bool, s setup, story func(n *kindNode)) (got account) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		dir, natives, records := t.TempDir(), t.TempDir(), t.TempDir()
		k := newFakeNative(tableOf(proxyTable, "a", "b"))
		n := &kindNode{k: k}
		n.next = func(mode api.Mode) setup {
			next := s
			next.mode, next.guarded = mode, k
			next.store, next.journal, next.nativeStore = openStore(t, dir, identity(iptables.NFT)), records, nativestore.New(natives, nativestore.Identity{})
			return next
		}
		n.rig = start(t, iptables.NFT, n.next(s.mode))
		n.after(10 * time.Second)
		if native {
			want := k.standing(proxyTable)
			n.flush = func() { k.flushTable(proxyTable) }
			n.missed = func() { k.missing(n.flush) }
			n.owner = func() { k.sync(tableOf(proxyTable, "a", "b")) }
			n.refuse = func(is bool) { k.with(func() { k.refuses[proxyTable] = is }) }
			n.blind = func(is bool) { k.breakDown(map[bool]error{true: errNativeBroken}[is]) }
			n.change = func() {
				k.sync(tableOf(proxyTable, "a", "b", "c"))
				want = tableOf(proxyTable, "a", "b", "c")
			}
			n.back = func() bool {
				now := k.standing(proxyTable)
				return now != nil && now.Digest() == want.Digest()
			}
		} else {
			before := n.tables()[rules.IPv4][rules.Nat]
			n.flush = n.flushNat
			n.missed = n.flush
			n.owner = func() { n.write(rules.Nat, sectionOf(before)...) }
			n.refuse = func(is bool) {
				if is {
					n.fake.FailRestores(-1, iptables.ReasonOther)
				} else {
					n.fake.FailRestores(0, "")
				}
			}
			n.blind = func(is bool) {
				n.fake.FailReads(map[bool]error{true: errNativeBroken}[is])
				n.fake.FailProbes(map[bool]error{true: errNativeBroken}[is])
			}
			n.change = func() { n.write(rules.Nat, "-A KUBE-SERVICES -d 10.9.9.9/32 -j KUBE-MARK-MASQ") }
			n.back = func() bool {
				return n.tables()[rules.IPv4][rules.Nat].Chain("KUBE-SERVICES") != nil && len(n.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")) > 0
			}
		}
		n.from = len(n.log.String())
		story(n)
		got = n.account()
	})
	return got
}

// kindDiffers has the stories that differ. The function makes the account of iptables' tables that
// of native ones. Most differ because canaryd's marks in iptables' tables are lost with the rules:
// a replay writes them although the owner has put the rules back.
var kindDiffers = map[string]func(iptables *account){
	"the owner is faster": func(t *account) {
		t.Log = []string{"Rules are being flushed", "canaryd read the tables again and found nothing missing"}
		t.Records, t.Metrics = nil, series{}
	},
	"in a pause, and its owner is back before the end": func(t *account) { delete(t.Metrics, replaysProved) },
	"refused, and its owner writes":                    func(t *account) { delete(t.Metrics, replaysProved) },
	"its messages are missed":                          withoutProcess,
	"while no canaryd runs":                            withoutProcess,
	"a flush in a pause, and canaryd is down":          withoutProcess,
	"missed while observed, and its owner writes":      withoutProcess,
	"while no canaryd runs, for long":                  withoutWhy,
	"stopped while it is refused":                      withoutWhy,
	"nothing can be read for a time": func(t *account) {
		t.Records = []string{"proved, absent, at most, by a process"} // a hint has the time of one flush, not of each commit
	},
	"nothing can be read, and the owner is faster": func(t *account) {
		t.Log, t.Records, t.Metrics = t.Log[:2], nil, series{}
	},
	"a pause over a restart, whose owner writes while canaryd is down": func(t *account) {
		t.Log = slices.Delete(t.Log, 1, 2) // marks are missing, and rules may be
		t.Records = []string{"skipped, absent, at most, by a process, earlier"}
		delete(t.Metrics, replaysProved)
	},
	"a decision, restored on request": func(t *account) {
		// One generation has all of iptables' tables, and the request has to name it.
		t.Log = slices.Insert(t.Log, len(t.Log)-1, "The rules are back: they were restored on request")
		t.Records = []string{"proved, absent, at most"}
		t.Metrics[replaysProved], t.Metrics["rules_absent_seconds"] = 1, 1
		t.Back, t.Healthy = true, true
	},
}

const replaysProved = "replays_total result=proved"

// withoutProcess removes the culprit, whom iptables' Fake names without messages, too.
func withoutProcess(t *account) {
	t.Records[0] = strings.ReplaceAll(t.Records[0], ", by a process", "")
}

// withoutWhy removes the reason of a record that waits for a decision. The record of native tables
// has a reason for each table.
func withoutWhy(t *account) {
	for i, r := range t.Records {
		if strings.HasPrefix(r, string(api.AwaitingDecision)) {
			t.Records[i] = strings.TrimSuffix(r, ", why")
		}
	}
}

// TestKindsOfTableAreReportedAlike: a story has the same log lines, records and metrics, whatever
// kind of table it is about.
func TestKindsOfTableAreReportedAlike(t *testing.T) {
	for _, test := range kindStories {
		t.Run(test.name, func(t *testing.T) {
			iptables, native := accountOf(t, false, test.setup, test.story), accountOf(t, true, test.setup, test.story)
			if adapt := kindDiffers[test.name]; adapt != nil {
				adapt(&iptables)
			}
			if diff := cmp.Diff(iptables, native); diff != "" {
				t.Errorf("(-iptables +native):\n%s", diff)
			}
		})
	}
}
