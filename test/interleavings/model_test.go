package interleavings

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	// episodes is the number of stories in the life of one canaryd. After each, the world is
	// quiet and must be right.
	episodes = 5
	// monitor is kube-proxy's interval for its canary; really 30 s.
	monitor = 2 * time.Second
	poll    = time.Second
	// calm is longer than each wait of canaryd: jump grace, limit on replays, tries.
	calm = 60 * time.Second
	// starvedPace is the mean time between two turns of the actors on a starved node. There an
	// owner checks for a jump, and inserts it later than canaryd expects.
	starvedPace = 8 * time.Second
	// restless is far longer than a world needs to become calm.
	restless = 10 * time.Minute
)

// An outcome is the result of one seed.
type outcome struct {
	violations []string
	story, log string
	count      tally
}

// A casting fills a world with its troupe.
type casting func(w *world) *troupe

// tellStory runs canaryd through the episodes of one seed.
func tellStory(t *testing.T, cast casting, p path, m mutant, seed uint64) outcome {
	var result outcome
	synctest.Test(t, func(t *testing.T) { result = inBubble(t, cast, p, m, seed) })
	return result
}

// paceOf makes every second world write its replays in two stages. Otherwise only replays of
// some thousand rules do that.
func paceOf(seed uint64) reload.Pace {
	if seed%2 == 0 {
		return 0
	}
	return reload.Pace(time.Second)
}

func inBubble(t *testing.T, cast casting, p path, m mutant, seed uint64) outcome {
	selector, err := protect.NewSelector(scenario.Protect)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(p, m, seed, selector.Protects)
	tr := cast(w)
	if err := load(t.Context(), scenario.FakePrograms{Fake: w.Fake}); err != nil {
		t.Fatal(err)
	}
	for _, proxy := range tr.proxies {
		finish(w, proxy)
	}
	w.ledger.observe(byOwner)

	var log bytes.Buffer
	registry := prometheus.NewRegistry()
	d := daemon.New(daemon.Config{
		Kernel: w, Hints: w.hints, Writers: &watch.Writers{},
		Metrics: metrics.NewMetrics(registry, metrics.MetricsOptions{Families: rules.Families(), Sources: []string{"snapshot"}}),
		Mode:    api.Heal, Source: "snapshot", Protection: selector.Protection(), Canary: canary.DefaultChain,
		PollInterval: poll, Settle: 20 * time.Millisecond, JumpGrace: jumpGrace, MaxStoredAge: 10 * time.Minute,
		Uptime: func() time.Duration { return time.Hour }, Pace: paceOf(seed),
	})
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))))
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	time.Sleep(2 * time.Second)
	synctest.Wait()
	for episode := range episodes {
		w.tell("episode %d", episode+1)
		if tr.plot != nil {
			tr.plot.begin(w)
		}
		tr.play(w, d)
		tr.settle(w, d)
		if tr.plot != nil {
			tr.plot.end(w)
		}
		if len(w.ledger.violations) > 0 {
			break
		}
	}
	cancel()
	if err := <-ended; err != nil {
		w.ledger.violation("Run ended with %v", err)
	}
	w.count.raced, w.count.bridged, w.count.merged = w.ledger.raced, w.ledger.stale, w.ledger.merged
	for _, proxy := range tr.proxies {
		w.count.noticed += proxy.noticed
	}
	w.count.replays = len(d.Status().Flushes)
	return outcome{w.ledger.violations, strings.Join(w.story, "\n"), log.String(), w.count}
}

// play plays one episode: all actors work until the budget is used up.
func (tr *troupe) play(w *world, d *daemon.Daemon) {
	w.density = []float64{0.03, 0.15, 0.4}[w.rng.IntN(3)]
	w.naps = []float64{0, 0.02, 0.2}[w.rng.IntN(3)]
	w.deaf = []float64{0, 0, 0.3}[w.rng.IntN(3)]
	w.budget = 5 + w.rng.IntN(60)
	pace := []time.Duration{time.Millisecond, 30 * time.Millisecond, 700 * time.Millisecond}[w.rng.IntN(3)]
	if w.seed%3 == 2 && tr.plot == nil { // a plot has its own pace
		pace = starvedPace
	}
	for w.budget > 0 {
		pause := time.Duration(w.rng.ExpFloat64() * float64(pace))
		w.turn()
		time.Sleep(pause)
		synctest.Wait()
		a := w.pick()
		for range 1 + w.rng.IntN(4) {
			w.budget--
			w.drive(func() { w.act(a, "while canaryd waits") })
		}
		tr.look(w, d)
	}
	w.budget = 0
}

// drive runs do on the test's goroutine, and then gives canaryd the hints.
func (w *world) drive(do func()) {
	w.driving = true
	do()
	w.driving = false
	if w.hinted {
		w.hinted = false
		w.hints.Give(watch.SourceNFT)
	}
	synctest.Wait()
}

// look compares canaryd's present claims with the world.
func (tr *troupe) look(w *world, d *daemon.Daemon) {
	s := d.Status()
	if !w.dozing.IsZero() || w.session || s.Ready() != nil {
		return
	}
	if long, missing := w.ledger.unmarked(); missing && long >= w.patience() {
		w.ledger.violation("canaryd says that it is ready, and canaries have been missing for %s of the time that it was awake", long)
	}
	if s.LearningPendingSince.IsZero() && w.deaf == 0 {
		w.ledger.capture()
	}
}

// patience returns how long canaries may be missing before canaryd must report it. If a hint
// was lost, or waits on legacy for its share of time, the next poll looks.
func (w *world) patience() time.Duration {
	if w.deaf > 0 || w.path == legacy && w.dozed > 0 {
		return 2 * poll
	}
	return 0
}

// settle lets all actors finish, and then only kube-proxy looks at its canary. In the end the
// world must be right.
func (tr *troupe) settle(w *world, d *daemon.Daemon) {
	w.density, w.naps, w.deaf = 0, 0, 0
	w.tell("no new trouble")
	start := time.Now()
	for quiet := time.Duration(0); quiet < calm; quiet += monitor {
		if time.Since(start) > restless {
			w.ledger.violation("no actor does anything new, and they do not come to rest")
			break
		}
		// canaryd may still be working when the trouble ends, for longer than that, and it
		// holds the lock meanwhile.
		for rested := false; !rested || w.session; rested = true {
			w.turn()
			time.Sleep(monitor)
			synctest.Wait()
		}
		for _, proxy := range tr.proxies {
			w.drive(func() { w.still++; _ = proxy.poll().do(); w.still-- })
			if !proxy.idle() || len(w.queue) > 0 {
				quiet = 0
			}
		}
		for _, a := range w.cast {
			w.drive(func() { tr.finishActor(w, a) })
		}
		tr.look(w, d)
	}
	tr.judge(w, d)
}

// finishActor does the rest of an actor's work.
func (tr *troupe) finishActor(w *world, a *actor) {
	if slices.Contains(w.queue, a) {
		return
	}
	for _, p := range tr.proxies {
		if a.proxy == p && !p.idle() {
			finish(w, p)
		}
	}
	pending := &tr.flusher.pending
	if a.pods != nil {
		pending = &a.pods.pending
	} else if a.who != byFlusher {
		return
	}
	for len(*pending) > 0 {
		w.act(a, "to the end")
	}
}

// finish does all of kube-proxy's work.
func finish(w *world, p *proxy) {
	for range 200 {
		s, ok := p.next()
		if !ok {
			return
		}
		w.do(&actor{who: byOwner}, s, "to the end")
	}
	w.ledger.violation("kube-proxy of %s does not come to an end", p.family)
}

// judge records the final violations.
func (tr *troupe) judge(w *world, d *daemon.Daemon) {
	l := w.ledger
	for _, p := range tr.proxies {
		for t, lines := range p.wanted() {
			l.violations = append(l.violations, p.notNewest(t, lines, l.last[p.family][t])...)
		}
	}
	w.count.doubled = len(l.doubled())
	for f, set := range l.last {
		for t, table := range set {
			for _, c := range table.Chains {
				if strings.Contains(c.Name, "TRIAL") {
					l.violation("in the end %s %s still has %s", f, t, c.Name)
				}
			}
		}
	}
	s := d.Status()
	l.judgeRecords(s.Flushes)
	if err := s.Ready(); err != nil || !s.LossSince.IsZero() || !s.LearningPendingSince.IsZero() {
		l.violation("in the end canaryd is not at rest: ready %v, loss since %v, capture pending since %v", err, s.LossSince, s.LearningPendingSince)
	}
	if !marked(w) {
		l.violation("in the end canaries are missing")
	}
}

// notNewest compares one table with kube-proxy's rules for it.
func (p *proxy) notNewest(t rules.TableName, lines []string, got *rules.Table) (wrong []string) {
	set, err := savefile.Parse(section(t, lines...))
	if err != nil {
		return []string{fmt.Sprintf("the stand-in writes what cannot be read: %v", err)}
	}
	want := set[t]
	for _, name := range scenario.ChainNames(want, got) {
		if rules.Builtin(t, name) || !strings.HasPrefix(name, "KUBE-") || strings.HasSuffix(name, "-CANARY") || name == "KUBE-IPTABLES-HINT" {
			continue
		}
		wanted, is := content(want.Chain(name)), content(got.Chain(name))
		if (wanted == nil) != (is == nil) || !rules.EqualRules(wanted, is) {
			wrong = append(wrong, fmt.Sprintf("in the end %s %s %s is not its owner's newest:\n  is  %s\n  not %s", p.family, t, name, texts(is), texts(wanted)))
		}
	}
	for _, j := range jumps {
		if j.table != t {
			continue
		}
		if !slices.ContainsFunc(content(got.Chain(j.from)), func(r rules.Rule) bool { return r.Spec == j.spec() }) {
			wrong = append(wrong, fmt.Sprintf("in the end %s %s %s does not jump to %s", p.family, t, j.from, j.to))
		}
	}
	return wrong
}

// fail prints the violations of a story, and with a seed all of the story.
func (s outcome) fail(t *testing.T, p path, seed uint64) {
	t.Helper()
	test, _, _ := strings.Cut(t.Name(), "/")
	t.Errorf("%s=%s/%d go test ./test/interleavings -run '%s$' plays it again:\n%s", seedVariable, p, seed, test, strings.Join(s.violations, "\n"))
	if os.Getenv(seedVariable) != "" {
		t.Logf("the story:\n%s\ncanaryd's log:\n%s", s.story, s.log)
	}
}

// jumpGrace is canaryd's --jump-grace.
const jumpGrace = 15 * time.Second

// seedVariable names the environment variable that chooses one story, such as nft-text/17.
const seedVariable = "CANARYD_SEED"

// lengthVariable names the environment variable for a duration, such as 10m, in which stories
// with other seeds run.
const lengthVariable = "CANARYD_SOAK"

// seeds returns the seeds for one path: always the same ones, or as many as there is time for.
func seeds(t *testing.T, each int) iter.Seq[uint64] {
	length := os.Getenv(lengthVariable)
	if length == "" {
		return func(yield func(uint64) bool) {
			for seed := range uint64(each) {
				if !yield(seed) {
					return
				}
			}
		}
	}
	long, err := time.ParseDuration(length)
	if err != nil {
		t.Fatalf("%s: %v", lengthVariable, err)
	}
	return func(yield func(uint64) bool) {
		seed := uint64(time.Now().Unix()) * 1000
		for range testkit.During(t, long/time.Duration(len(paths())), "how long stories are told") {
			if !yield(seed) {
				return
			}
			seed++
		}
	}
}

// interleavings plays stories with that cast, or the story that the environment names.
func interleavings(t *testing.T, cast casting, each int) {
	if text := os.Getenv(seedVariable); text != "" {
		p, number, _ := strings.Cut(text, "/")
		var seed uint64
		if _, err := fmt.Sscan(number, &seed); err != nil || !slices.Contains(paths(), path(p)) {
			t.Fatalf("%s=%q: want such as nft-text/17", seedVariable, text)
		}
		s := tellStory(t, cast, path(p), whole, seed)
		if len(s.violations) > 0 {
			s.fail(t, path(p), seed)
		}
		t.Logf("%s", s.count)
		return
	}
	for _, p := range paths() {
		t.Run(string(p), func(t *testing.T) {
			var all tally
			start, first, runs := time.Now(), uint64(0), 0
			for seed := range seeds(t, each) {
				if runs == 0 {
					first = seed
				}
				s := tellStory(t, cast, p, whole, seed)
				all.add(s.count)
				runs++
				if len(s.violations) > 0 {
					s.fail(t, p, seed)
				}
			}
			t.Logf("%d seeds from %d, %d episodes in %s: %s", runs, first, runs*episodes, time.Since(start).Round(time.Millisecond), all)
		})
	}
}

// TestInterleavings plays thousands of steps of owners and flushers, at any point of canaryd's
// work. In the end all rules must be their owner's newest.
func TestInterleavings(t *testing.T) { interleavings(t, newTroupe, testkit.Size(1, 40)) }

// TestTheCheckerFindsMissingGuards: without the comparison of the genid, or without the lock,
// canaryd overwrites a newer write, and the checker finds that.
func TestTheCheckerFindsMissingGuards(t *testing.T) {
	for _, test := range []struct {
		m    mutant
		p    path
		from uint64 // near the first seed that finds it
	}{{unguarded, nftDirect, 205}, {unlocked, legacy, 119}} {
		m, p := test.m, test.p
		t.Run(string(m), func(t *testing.T) {
			const most = 200
			for seed := test.from; seed < test.from+most; seed++ {
				s := tellStory(t, newTroupe, p, m, seed)
				found := slices.IndexFunc(s.violations, func(v string) bool { return strings.HasPrefix(v, "a newer write was written over") })
				if found >= 0 {
					t.Logf("found by seed %d: %s", seed, s.violations[found])
					return
				}
			}
			t.Errorf("%d seeds on %s found nothing wrong with canaryd %s", most, p, m)
		})
	}
}
