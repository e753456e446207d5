package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"html"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
	"github.com/canaryd/canaryd/internal/web"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

var backends = []iptables.Backend{iptables.NFT, iptables.Legacy}

// eachBackend runs body for both backends, each in a bubble of virtual time. With the race
// detector the test's name chooses one, because the same goroutines meet on both.
func eachBackend(t *testing.T, body func(t *testing.T, backend iptables.Backend)) {
	all := backends
	if testkit.Raced {
		all = backends[chosen(t):][:1]
	}
	onBackends(t, all, body)
}

// oneBackend is eachBackend for a case of a long table whose policy is the same on both
// backends. The case's name chooses the backend, and make test-large runs the other.
func oneBackend(t *testing.T, body func(t *testing.T, backend iptables.Backend)) {
	at := chosen(t)
	onBackends(t, backends[testkit.Size(at, 1-at):][:1], body)
}

// chosen returns the index of the backend that the test's name chooses.
func chosen(t *testing.T) int { return int(crc32.ChecksumIEEE([]byte(t.Name())) % 2) }

func onBackends(t *testing.T, all []iptables.Backend, body func(t *testing.T, backend iptables.Backend)) {
	for _, backend := range all {
		t.Run(string(backend), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { body(t, backend) })
		})
	}
}

// A setup has the differences from a daemon that `canaryd run` starts.
type setup struct {
	mode  api.Mode
	deaf  bool // the loop gets no hints, and only polls
	store *reload.Store
	// journal is the folder of the flush records; "" is none.
	journal string
	// declared is a manifest's declaration at the start; nil is no manifest.
	declared rules.Generation
	// origin returns the place of a declared rule; nil is not known.
	origin func(rules.Family, rules.TableName, string, rules.Rule) Origin
	// broken are the errors of declared files at the start.
	broken []api.SourceError
	// kernel replaces the Fake, mostly as a wrapper; nil is the Fake itself.
	kernel Kernel
	// uptime is the machine's; nil is the bubble's.
	uptime     func() time.Duration
	freeMemory func() // nil: nothing
	// protect is --protect; nil names the owners of the scenarios' node.
	protect []string
	// flows are the node's; nil leaves them alone.
	flows Tracker
	cpu   func() time.Duration // nil: reads cost their duration
	// native returns the names of nftables' own tables; nil is that they are not known.
	native func(context.Context) ([]string, error)
	// guarded has the native tables that canaryd guards; nil: none.
	guarded *fakeNative
	// nativeStep runs before each call to guarded; nil: nothing.
	nativeStep func()
	// interposed wraps guarded as the loop's kernel; nil: nothing does.
	interposed NativeKernel
	named      string // a word that names one more table, where globs match the others
	asleep     bool   // guarded is opened only once one of its tables exists
	// rehearse says whether the kernel would take a table again; nil: canaryd does not check
	// that.
	rehearse func(*native.Table) error
	// nativeStore keeps native tables on disk; nil: no store.
	nativeStore *nativestore.Store
	// leftOut returns the chains that were left out; nil: none.
	leftOut func() []iptables.LeftOut
	// settle is --settle; 0 is its default.
	settle time.Duration
	// drillEvery is --drill-every; 0: no scheduled drill.
	drillEvery time.Duration
	// keeper keeps connections; nil: none.
	keeper Keeper
	// standby translates during a replay; nil: none.
	standby *fakeStandby
	// nativeStandby translates in place of native tables; nil: none.
	nativeStandby *fakeNativeStandby
	// nativeStandbyOff is the reason for its absence.
	nativeStandbyOff string
	// standbyAuto is --standby=auto.
	standbyAuto bool
	// listenRequired is --metrics-required.
	listenRequired bool
	// attachments are libcni's files; nil: canaryd reads none.
	attachments pods.Attachments
	// elsewhere opens the other backend; nil: it cannot be opened.
	elsewhere  func(context.Context, iptables.Backend) (Reader, func(), error)
	saverDelay func() // the disk's delay of each save; nil: there is none
}

// A rig is a running Daemon on a Fake.
type rig struct {
	t       *testing.T
	fake    *iptablestest.Fake
	d       *Daemon
	hints   *watch.Hints
	writers *watch.Writers
	deleted uint32 // by delete, so far
	reg     *prometheus.Registry
	log     *logText
	declare chan Declaration // nil without a manifest
	broken  chan []api.SourceError
	cancel  context.CancelFunc
	ended   chan error
}

// loadedFake returns a Fake with the rules of the scenarios' node.
func loadedFake(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	loaded.Do(func() {
		for backend := range loaded.fakes {
			fake := iptablestest.NewFake(backend)
			must(t, scenario.Load(t.Context(), scenario.FakePrograms{Fake: fake}, rules.Families()...))
			loaded.fakes[backend] = fake
		}
	})
	return loaded.fakes[backend].Copy()
}

// loaded has the Fakes that loadedFake copies, because writing the node's rules takes longer
// than most stories.
var loaded = struct {
	sync.Once
	fakes map[iptables.Backend]*iptablestest.Fake
}{fakes: map[iptables.Backend]*iptablestest.Fake{iptables.NFT: nil, iptables.Legacy: nil}}

// start runs a Daemon on a loaded Fake until the bubble ends. It returns once the Daemon has
// captured the rules.
func start(t *testing.T, backend iptables.Backend, s setup) *rig {
	t.Helper()
	return startOn(t, loadedFake(t, backend), s)
}

// startOn is start on that Fake.
func startOn(t *testing.T, fake *iptablestest.Fake, s setup) *rig {
	t.Helper()
	r := run(t, fake, s)
	r.settled()
	if err := r.d.Status().Ready(); err != nil {
		t.Fatalf("not ready after the start: %v\n%s", err, r.log)
	}
	return r
}

// run runs a Daemon on fake and waits for nothing.
func run(t *testing.T, fake *iptablestest.Fake, s setup) *rig {
	t.Helper()
	r := configure(t, fake, s)
	r.begin()
	return r
}

// begin runs a configured Daemon.
func (r *rig) begin() {
	t := r.t
	t.Helper()
	ctx, cancel := context.WithCancel(r.log.context(t.Context(), 1))
	r.cancel = sync.OnceFunc(func() {
		cancel()
		if err := <-r.ended; err != nil {
			t.Errorf("Run ended with %v", err)
		}
	})
	go func() { r.ended <- r.d.Run(ctx) }()
	t.Cleanup(func() {
		r.cancel()
		if t.Failed() {
			t.Logf("canaryd's log:\n%s", r.log)
		}
	})
}

// configure makes a Daemon on fake that does not run yet.
func configure(t *testing.T, fake *iptablestest.Fake, s setup) *rig {
	t.Helper()
	if s.protect == nil {
		s.protect = scenario.Protect
	}
	selector, err := protect.NewSelector(s.protect)
	must(t, err)
	if s.mode == "" {
		s.mode = api.Heal
	}
	if s.uptime == nil {
		s.uptime = bubbleUptime
	}
	r := &rig{
		t: t, fake: fake, hints: watch.NewHints(), writers: &watch.Writers{},
		reg: prometheus.NewRegistry(), log: &logText{}, ended: make(chan error, 1),
	}
	metrics := metrics.NewMetrics(r.reg, metrics.MetricsOptions{Families: fake.Families(), Sources: []string{"snapshot"}, Hints: r.hints.Counts})
	// Tests gather thousands of times, and these two collectors take most of that time.
	r.reg.Unregister(collectors.NewGoCollector())
	r.reg.Unregister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	cfg := Config{
		ListenRequired: s.listenRequired,
		Kernel:         fake, Hints: r.hints, Writers: r.writers, Metrics: metrics,
		Mode: s.mode, Source: "snapshot", Protection: selector.Protection(), Protect: protect.Join(s.protect), Canary: canary.DefaultChain, Sets: fake.Sets(),
		PollInterval: time.Second, Settle: 20 * time.Millisecond, JumpGrace: 15 * time.Second, DrillEvery: s.drillEvery,
		MaxStoredAge: 10 * time.Minute, Store: s.store, Uptime: s.uptime, FreeMemory: s.freeMemory, Flows: s.flows, CPU: s.cpu, Keeper: s.keeper, Attachments: s.attachments, Elsewhere: s.elsewhere,
	}
	cfg.NativeTables, cfg.LeftOut = s.native, s.leftOut
	cfg.Standby = s.standbyConfig()
	hints, writers := r.hints, r.writers // a test may put another rig into this one
	if s.guarded != nil {
		if fake.Info().Backend == iptables.NFT { // they share one kernel
			s.guarded.kernel = fake
			fake.Carries(s.guarded)
		}
		words := []string{"nft:ip:*", "nft:ip6:*", "nft:inet:*"}
		if s.named != "" {
			words = append(words, s.named)
		}
		all, err := protect.NewSelector(words)
		must(t, err)
		cfg.Native = NativeConfig{Kernel: s.guarded, Protects: all.ProtectsTable, Named: all.NamedTables(), Rehearse: s.rehearse, Store: s.nativeStore, RemoveDrills: s.guarded.removeDrills}
		if s.nativeStep != nil {
			cfg.Native.Kernel = steppingNative{s.guarded, s.nativeStep}
			cfg.Native.RemoveDrills = func() error { s.nativeStep(); return s.guarded.removeDrills() }
		}
		if s.interposed != nil {
			cfg.Native.Kernel = s.interposed
		}
		if s.asleep {
			cfg.Native.Wake = s.guarded.wake
		}
		s.guarded.onCommit = func(c nft.Commit) {
			if !s.deaf {
				w := watch.Writer{Time: time.Now(), Genid: c.Genid, PID: c.PID, Comm: c.Comm, Command: c.Comm + " flush", Own: c.Own, Origin: s.guarded.origin, Neighbour: s.guarded.neighbour}
				if s.guarded.unread {
					w.Command, w.Unread = s.guarded.line, true
				}
				if s.guarded.late > 0 {
					time.AfterFunc(s.guarded.late, func() { writers.Note(w) })
				} else {
					writers.Note(w)
				}
				hints.Give(watch.SourceNFT)
			}
		}
	}
	r.broken = make(chan []api.SourceError)
	cfg.BrokenSources, cfg.SourceErrors = s.broken, r.broken
	if s.settle > 0 {
		cfg.Settle = s.settle
	}
	if s.journal != "" {
		cfg.Journal = journal.New(s.journal)
	}
	if s.kernel != nil {
		cfg.Kernel = s.kernel
	}
	if s.declared != nil {
		r.declare = make(chan Declaration)
		cfg.Declared, cfg.Declarations = &Declaration{Generation: s.declared, Claims: claims, Origin: s.origin}, r.declare
	}
	r.d = New(cfg)
	r.d.saver.delay = s.saverDelay
	if !s.deaf {
		fake.OnUnlock(func() { hints.Give(watch.SourceLock) })
		fake.OnCommit(func(c nft.Commit) {
			writers.Note(watch.Writer{Time: time.Now(), Genid: c.Genid, PID: c.PID, Comm: c.Comm, Command: c.Comm + " -F", Own: c.Own})
			hints.Give(watch.SourceNFT)
		})
	}
	return r
}

// bubbleUptime returns the time since the bubble began. All bubbles begin at the same time.
func bubbleUptime() time.Duration {
	return time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
}

// stop ends the daemon as SIGTERM does.
func (r *rig) stop() { r.cancel() }

// after lets that time pass, and waits until the due work is done.
func (r *rig) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// settled waits until the daemon has dealt with all events, new nonces and follow-up looks
// included, but not graces of 2 s and more.
func (r *rig) settled() { r.after(1900 * time.Millisecond) }

// programs returns the programs of others.
func (r *rig) programs() scenario.FakePrograms { return scenario.FakePrograms{Fake: r.fake} }

// tables returns all tables of the Fake. It is the Fake's memory: copy before a change.
func (r *rig) tables() map[rules.Family]rules.Ruleset {
	r.t.Helper()
	all := map[rules.Family]rules.Ruleset{}
	for _, f := range r.fake.Families() {
		all[f] = r.fake.Tables(f)
	}
	return all
}

// wantBack fails unless everything protected is as in before and everything
// foreign as in foreign.
func (r *rig) wantBack(before, foreign map[rules.Family]rules.Ruleset) {
	r.t.Helper()
	r.wantTables(before, foreign)
	r.wantReady()
}

// wantTables is wantBack of a daemon that need not be ready.
func (r *rig) wantTables(before, foreign map[rules.Family]rules.Ruleset) {
	r.t.Helper()
	now := r.tables()
	for _, f := range r.fake.Families() {
		want := scenario.Want{Protected: before[f], Foreign: foreign[f], Protects: r.d.cfg.Protection.Chain, MatchesPreset: r.d.cfg.Protection.Rule}
		for _, line := range scenario.Compare(want, now[f]) {
			r.t.Errorf("%s %s", f, line)
		}
	}
}

func (r *rig) wantReady() {
	r.t.Helper()
	s := r.d.Status()
	if err := s.Ready(); err != nil || !s.Healthy || !s.LossSince.IsZero() {
		r.t.Errorf("ready: %v, healthy: %t, loss since %v", err, s.Healthy, s.LossSince)
	}
}

// wantBare fails unless the daemon is ready and says that nothing is protected.
func (r *rig) wantBare() {
	r.t.Helper()
	s := r.d.Status()
	if err := s.Ready(); err != nil || s.Healthy || s.NothingProtected == nil || !s.LossSince.IsZero() {
		r.t.Errorf("ready: %v, healthy: %t, nothing protected: %v, loss since %v", err, s.Healthy, s.NothingProtected, s.LossSince)
	}
}

// wantNotReady fails unless the daemon says that something is wrong.
func (r *rig) wantNotReady(why string) {
	r.t.Helper()
	s := r.d.Status()
	if err := s.Ready(); err == nil || s.Healthy || !strings.Contains(err.Error(), why) {
		r.t.Errorf("ready: %v, healthy: %t; want not ready because of %q", err, s.Healthy, why)
	}
}

// chain returns one chain's rules without canaryd's own, nil if it is missing.
func (r *rig) chain(f rules.Family, table rules.TableName, name string) []string {
	r.t.Helper()
	c := r.tables()[f][table].Chain(name)
	if c == nil {
		return nil
	}
	specs := []string{}
	for _, rule := range c.Rules {
		if !canary.IsMark(rule) {
			specs = append(specs, rule.Spec)
		}
	}
	return specs
}

// write runs iptables-restore --noflush with lines for one IPv4 table.
func (r *rig) write(table rules.TableName, lines ...string) {
	r.t.Helper()
	must(r.t, r.fake.RestoreNoflush(rules.IPv4, section(table, lines...)))
}

func section(table rules.TableName, lines ...string) string {
	return fmt.Sprintf("*%s\n%s\nCOMMIT\n", table, strings.Join(lines, "\n"))
}

// A series has the metrics that are not 0, such as "replays_total{family=ipv4,result=proved}".
type series map[string]float64

// metrics returns the metrics whose names have one of the prefixes. A histogram counts its
// observations.
func (r *rig) metrics(prefixes ...string) series {
	r.t.Helper()
	families, err := r.reg.Gather()
	must(r.t, err)
	found := series{}
	for _, family := range families {
		name := strings.TrimPrefix(family.GetName(), "canaryd_")
		if !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			continue
		}
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			key := name
			if len(labels) > 0 {
				key += "{" + strings.Join(labels, ",") + "}"
			}
			v := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			if v != 0 {
				found[key] = v
			}
		}
	}
	return found
}

// moved returns the changes of the metrics with one of the prefixes while do ran.
func (r *rig) moved(do func(), prefixes ...string) series {
	r.t.Helper()
	before := r.metrics(prefixes...)
	do()
	after := r.metrics(prefixes...)
	delta := series{}
	for key := range after {
		delta[key] = 0
	}
	for key := range before {
		delta[key] = 0
	}
	for key := range delta {
		if delta[key] = after[key] - before[key]; delta[key] == 0 {
			delete(delta, key)
		}
	}
	return delta
}

// lossMetrics are the prefixes of all metrics that a flush may change.
var lossMetrics = []string{"flush_events", "flushes", "replays_total", "restore_failures_total", "rules_absent_seconds", "loss_since"}

// wantMoved fails unless exactly these metrics moved by that much.
func wantMoved(t *testing.T, got, want series) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("metrics moved otherwise (-want +got):\n%s", diff)
	}
}

// healed returns the changes of metrics by healed flushes of the given tables.
func healed(lost scenario.Lost, times float64) series {
	want := series{"flush_events_total": times, "rules_absent_seconds": times}
	for _, f := range rules.Families() {
		result := reload.Proved
		if len(tableid.Of(lost, f)) == 0 {
			result = reload.Skipped
		}
		want[fmt.Sprintf("replays_total{family=%s,result=%s}", f, result)] = times
		for table, kind := range tableid.Of(lost, f) {
			want[fmt.Sprintf("flushes_total{family=%s,kind=%s,table=%s}", f, kind, table)] = times
		}
	}
	return want
}

// records returns the flush records after the first n, oldest first.
func (r *rig) records(n int) []api.Flush {
	flushes := slices.Clone(r.d.Status().Flushes)
	slices.Reverse(flushes)
	return flushes[min(n, len(flushes)):]
}

// oneRecord returns the only flush record.
func (r *rig) oneRecord() api.Flush {
	r.t.Helper()
	records := r.records(0)
	if len(records) != 1 {
		r.t.Fatalf("%d flush records, want one: %+v", len(records), records)
	}
	return records[0]
}

// wantLog fails unless the log has a line with that text.
func (r *rig) wantLog(text string) {
	r.t.Helper()
	if !strings.Contains(r.log.String(), text) {
		r.t.Errorf("the log does not say %q", text)
	}
}

// statusJSON returns the output of status -o json.
func (r *rig) statusJSON() map[string]any {
	r.t.Helper()
	text, err := json.Marshal(r.d.Status())
	must(r.t, err)
	var object map[string]any
	must(r.t, json.Unmarshal(text, &object))
	return object
}

// without returns the tables without canaryd's marks, as comparable text.
func without(tables map[rules.Family]rules.Ruleset) string {
	var b strings.Builder
	for _, f := range rules.Families() {
		for _, name := range slices.Sorted(maps.Keys(tables[f])) {
			for _, c := range tables[f][name].Chains {
				if c.Name == canary.DefaultChain {
					continue
				}
				fmt.Fprintln(&b, f, name, c.Name, c.Policy)
				for _, rule := range c.Rules {
					if !canary.IsMark(rule) {
						fmt.Fprintln(&b, "  ", rule.Spec)
					}
				}
			}
		}
	}
	return b.String()
}

// A logText is canaryd's log.
type logText struct{ testlog.Log }

// context returns a context whose logger writes to l.
func (l *logText) context(ctx context.Context, verbosity int) context.Context {
	return klog.NewContext(ctx, textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(l), textlogger.Verbosity(verbosity))))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pageOf returns the page of a status as the text that a browser shows.
func pageOf(t testing.TB, s api.Status) string {
	t.Helper()
	w := httptest.NewRecorder()
	handler := web.NewHTTPHandler(web.About{Node: "node-1", Version: "0.1.0"}, func() api.Status { return s }, func() error { return nil }, prometheus.NewRegistry())
	handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("the page: %d", w.Code)
	}
	return html.UnescapeString(w.Body.String())
}
