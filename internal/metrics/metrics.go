// Package metrics counts the daemon's work for Prometheus. A series that an alert compares with
// its past exists from the first scrape on. Other series appear with their first value other
// than 0, because each series costs memory for each node of a fleet.
//
// [NewMetrics] registers the metrics, and [Metrics] has one method for each event: Observe methods
// count, Set methods record a state. NewMetrics panics if the registry has one of the metrics
// already; nothing else fails. Any goroutine may call the methods.
package metrics

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// MetricsOptions has the data with which NewMetrics creates all label values at once.
type MetricsOptions struct {
	Families []rules.Family // the enabled ones
	Sources  []string       // names of the sources of generations in use
	// Hints returns how many hints each source has given, at each scrape; nil means none.
	Hints           func() map[watch.Source]uint64
	Version, Commit string
	GoVersion       string
}

// A ProbeResult is the label result of canaryd_probes_total.
type ProbeResult string

// The results of a probe.
const (
	ProbeIntact  ProbeResult = "intact"
	ProbeLoss    ProbeResult = "loss"
	ProbeUnknown ProbeResult = "unknown"
)

// Metrics counts and times the work of the loop. It has one method for each event, which may
// change many series. Any goroutine may call the methods.
type Metrics struct {
	flushes, replays, restoreFailures *prometheus.CounterVec
	probes, sourceErrors              *prometheus.CounterVec
	flowsEnded, sweepErrors           *prometheus.CounterVec
	flushEvents, journalErrors        prometheus.Counter
	stateErrors                       prometheus.Counter
	stateSaved                        prometheus.Gauge
	flushedUnprotected                *prometheus.CounterVec
	unprotectedUnknown                *prometheus.CounterVec
	nativeInForce, nativeRefused      *prometheus.GaugeVec
	nativeElements                    *prometheus.GaugeVec
	nativeWitness                     *prometheus.GaugeVec
	nativeStandby, keeper, standby    stateGauges
	native                            map[string]nativeSeries // of the native tables shown, by table; the loop's

	canaryPresent, jumpsMissing       tableGauges
	generationRules, quarantined      tableGauges
	declaredRefused, leftOut          tableGauges
	opaque, policyDrops               tableGauges
	backend, mode, standbyOutstanding *prometheus.GaugeVec
	standbyOpen                       *prometheus.CounterVec
	lastFlush, generationTime         prometheus.Gauge
	drills                            *prometheus.CounterVec
	lastDrill, lastDrillPassed        prometheus.Gauge
	rulesAbsent, probeDuration        prometheus.Histogram
	replayDuration, standbyAfter      *prometheus.HistogramVec
	families                          []rules.Family
	status                            atomic.Pointer[api.Status] // the newest one
}

// Buckets, in seconds, as coarse as the dashboard's quantiles allow, because each bucket is a
// series of each node. A probe is one or two system calls. A replay takes from 5 ms for a small
// batch to a minute with iptables-nft-restore. Rules are absent for at least one good replay,
// and at most until their owner's slow sync. CanarydRepairSlow reads the bucket of 30 s.
var (
	probeBuckets  = []float64{50e-6, 250e-6, 1e-3, 5e-3, 50e-3, 1}
	replayBuckets = []float64{10e-3, 50e-3, 0.25, 1, 5, 30}
	absentBuckets = []float64{10e-3, 50e-3, 0.25, 1, 5, 30, 120}
)

// NewMetrics registers every metric with reg. Counters that alerts read begin at 0. A counter
// that first appears at 1 has no increase, so the first flush would raise no alert. NewMetrics
// panics if reg already has one of them.
func NewMetrics(reg prometheus.Registerer, o MetricsOptions) *Metrics {
	b := builder{reg}
	m := &Metrics{
		families: o.Families,

		flushes:         b.counters("flushes_total", "Tables that flushes hit.", "family", "table", "kind"),
		flushEvents:     b.counter("flush_events_total", "Flushes, however many tables each hit. Alert on this one."),
		replays:         b.counters("replays_total", "Replays by result.", "family", "result"),
		restoreFailures: b.counters("restore_failures_total", "Restores that iptables or the kernel refused, by reason.", "family", "reason"),
		probes:          b.counters("probes_total", "Probes by result.", "family", "result"),
		sourceErrors:    b.counters("source_errors_total", "Errors of a source of generations; the last good generation stays in force.", "source"),
		flowsEnded:      b.counters("conntrack_deleted_total", "Flows deleted from conntrack, because they began untranslated, or not masqueraded, while rules were missing.", "family", "protocol"),
		journalErrors:   b.counter("journal_errors_total", "Failed writes of flush records, with each try."),
		stateErrors:     b.counter("state_errors_total", "Failed writes to the state folder, with each try; a restart would know older rules."),
		sweepErrors:     b.counters("conntrack_errors_total", "Searches for such flows that failed or found too many.", "family"),

		canaryPresent:   b.tableGauges("canary_present", "Whether the last probe found the canary with its nonce; 0 after a cleanup."),
		jumpsMissing:    b.tableGauges("jumps_missing", "Jumps missing at the last examination."),
		generationRules: b.tableGauges("generation_rules", "Rules that ought to be in force."),
		quarantined:     b.tableGauges("quarantined_rules", "Rules in quarantine and rules that wait for them; of native tables also other parts."),
		declaredRefused: b.tableGauges("declared_refused", "Declared rules that iptables or the kernel refuses."),
		leftOut:         b.tableGauges("chains_left_out", "Chains above --max-rules, which are not guarded."),
		policyDrops:     b.tableGauges("policy_drops", "Built-in and native base chains whose policy became DROP since the generation was learned."),
		opaque:          b.tableGauges("opaque_rules", "Rules in force that canaryd could not put back."),
		keeper:          b.stateGauges("keeper", "Whether the keeper is in this state.", "family"),
		standby:         b.stateGauges("standby", "Whether the standby is in this state.", "family"),
		mode:            b.gauges("mode", "Whether canaryd runs in this mode.", "mode"),
		backend:         b.gauges("backend_info", "The iptables backend in use; always 1.", "family", "backend", "version"),

		lastFlush:      b.gauge("last_flush_timestamp_seconds", "First evidence of the last flush; 0 if there was none."),
		stateSaved:     b.gauge("state_saved_timestamp_seconds", "Last write of the generation to disk; 0 if never."),
		generationTime: b.gauge("generation_timestamp_seconds", "When the generation was captured or loaded; 0 while there is none."),

		rulesAbsent:    b.histogram("rules_absent_seconds", "From the first evidence of a loss to the proof.", absentBuckets),
		standbyAfter:   b.histograms("standby_after_seconds", "From the first evidence of a loss until the standby translated.", absentBuckets),
		probeDuration:  b.histogram("probe_duration_seconds", "Duration of a probe of one family.", probeBuckets),
		replayDuration: b.histograms("replay_duration_seconds", "Duration of a replay of one family, with its proof.", replayBuckets, "family"),
	}
	m.flushedUnprotected = b.counters("flushed_unprotected_rules_total", "Unprotected rules lost in flushes of protected ones, where their number is known. While raw or security has no protected rules: each removal of more than half, also by the owner.", "family", "table")
	m.unprotectedUnknown = b.counters("flushed_unprotected_unknown_total", "Flushed tables that may have lost an unknown number of unprotected rules.", "family", "table")
	m.drills = b.counters("drills_total", "Drills. Only one for real also counts as a flush.", "result")
	m.lastDrill = b.gauge("last_drill_timestamp_seconds", "The last drill; 0 if there was none.")
	m.lastDrillPassed = b.gauge("last_drill_passed", "Whether the last drill passed; 0 also if there was none.")
	m.nativeInForce = b.gauges("native_table_in_force", "Whether a guarded native table is in force.", "family", "table")
	m.nativeElements = b.gauges("native_table_elements", "Elements that the table's sets and maps ought to hold.", "family", "table")
	m.nativeRefused = b.gauges("native_table_refused", "Whether the kernel would refuse the table, or a part of it, in a replay.", "family", "table")
	m.nativeWitness = b.gauges("native_witness", "Whether the witness of the table's family exists.", "family", "table")
	m.nativeStandby = b.stateGauges("native_standby", "Whether the table's standby is in this state.", "family", "table")
	m.standbyOutstanding = b.gauges("standby_outstanding_chains", "Changed chains that the standby lacks.", "family")
	m.standbyOpen = b.counters("standby_open_seconds_total", "How long the standby has translated.", "family")
	build := b.gauges("build_info", "The running program; always 1.", "version", "commit", "goversion")
	build.WithLabelValues(o.Version, o.Commit, o.GoVersion).Set(1)
	reg.MustRegister(
		collectors.NewGoCollector(collectors.WithGoCollectorMemStatsMetricsDisabled()),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	b.hints(o.Hints)
	m.followStatus(b)
	m.zero(o.Sources)
	return m
}

// followStatus registers the gauges that show the newest Status: Prometheus reads them from the
// Status that SetStatus stored last. Before the first one all are 0.
func (m *Metrics) followStatus(b builder) {
	m.status.Store(&api.Status{})
	for _, g := range []struct {
		name, help string
		value      func(*api.Status) float64
	}{
		{"healthy", "Whether the node is healthy.", func(s *api.Status) float64 { return truth(s.Healthy) }},
		{"loss_since_timestamp_seconds", "First evidence of the present loss; 0 while nothing is lost.", func(s *api.Status) float64 { return seconds(s.LossSince) }},
		{"capture_pending_since_timestamp_seconds", "Since when the generation lags behind the owners' rules; 0 while it is current.", func(s *api.Status) float64 { return seconds(s.LearningPendingSince) }},
		{"last_examination_timestamp_seconds", "When canaryd last knew the content of all tables; 0 if never.", func(s *api.Status) float64 { return seconds(s.LastKnown) }},
		{"mixed_backends", "Whether both iptables backends hold rules.", func(s *api.Status) float64 { return truth(s.Backend.Mixed) }},
		{"backend_mismatch", "Whether the rules have moved to the other backend, which a restart would guard.", func(s *api.Status) float64 { return truth(s.Backend.Mismatch) }},
		{"paused", "Whether replays are paused.", func(s *api.Status) float64 { return truth(s.Paused) }},
		{"contended", "Whether a process keeps undoing the replays.", func(s *api.Status) float64 { return truth(s.Contended) }},
		{"rules_without_owner", "Whether kube-proxy's canary has been missing for two minutes while its rules are in force.", func(s *api.Status) float64 { return truth(s.RulesWithoutOwner != nil) }},
		{"nothing_protected", "Whether all tables were read and hold nothing to guard; kubelet's own rules do not count.", func(s *api.Status) float64 { return truth(s.NothingProtected != nil) }},
		{"awaiting_decision", "Whether a loss or a damaged stored file waits for a decision.", func(s *api.Status) float64 {
			return truth(s.Decision != nil || s.NativeAwaiting() || len(s.StateUnread) > 0)
		}},
		{"native_tables_not_guarded", "Native tables above the limit of 64 tables, or above --max-rules.", func(s *api.Status) float64 { return float64(s.NativeNotGuarded()) }},
	} {
		register(b, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Name: g.name, Help: g.help}, func() float64 { return g.value(m.status.Load()) }))
	}
}

// zero creates the series that an alert compares with their past, and the gauges that the
// dashboard always draws for each table.
func (m *Metrics) zero(sources []string) {
	create(m.sourceErrors, sources)
	create(m.mode, api.Modes())
	for _, family := range m.families {
		f := family.String()
		create(m.replays, vainOutcomes(), f)
		m.replayDuration.WithLabelValues(f)
		for _, table := range protect.Always() {
			m.canaryPresent.WithLabelValues(f, string(table))
			m.generationRules.WithLabelValues(f, string(table))
		}
	}
}

// vainOutcomes returns the outcomes of replays that did not put everything back. Alerts and
// docs/fleet.md count them.
func vainOutcomes() []api.Outcome { return []api.Outcome{reload.Failed, reload.Partial, reload.Raced} }

// create creates a series for each value of the last label, so that it is exported before its
// first event. labels are the values of the labels before it.
func create[M any, V ~string](vec interface{ WithLabelValues(...string) M }, values []V, labels ...string) {
	for _, v := range values {
		vec.WithLabelValues(append(labels, string(v))...)
	}
}

// ObserveProbe counts and times one probe of one family.
func (m *Metrics) ObserveProbe(family rules.Family, result ProbeResult, took time.Duration) {
	m.probes.WithLabelValues(family.String(), string(result)).Inc()
	m.probeDuration.Observe(took.Seconds())
}

// SetCanaryPresent records whether a probe found a table's canary with its nonce.
func (m *Metrics) SetCanaryPresent(family rules.Family, table rules.TableName, present bool) {
	m.canaryPresent.set(family.Table(table), truth(present))
}

// SetCanariesGone records that canaryd has removed its canaries and probes no more. A canary that
// it could not remove counts as gone, because it guards nothing.
func (m *Metrics) SetCanariesGone() {
	for _, family := range m.families {
		for _, table := range protect.Tables() {
			m.SetCanaryPresent(family, table, false)
		}
	}
}

// SetJumpsMissing records how many jumps of each table a full read of a family did not find.
// Tables that missing does not name keep their number.
func (m *Metrics) SetJumpsMissing(family rules.Family, missing map[rules.TableName]int) {
	for table, n := range missing {
		m.jumpsMissing.set(family.Table(table), float64(n))
	}
}

// ObserveFlush counts one flush record, first seen at the given time, and every table that it
// hit. Verdicts without a loss do not count.
func (m *Metrics) ObserveFlush(at time.Time, hit map[rules.Family]api.Verdicts) {
	m.flushEvents.Inc()
	m.lastFlush.Set(seconds(at))
	m.ObserveFurtherLoss(hit)
}

// ObserveFurtherLoss counts tables that were found lost after their record was opened. The
// record stays one event, so flush_events_total does not move.
func (m *Metrics) ObserveFurtherLoss(hit map[rules.Family]api.Verdicts) {
	for family, verdicts := range hit {
		for table, kind := range verdicts {
			if kind.Loss() {
				m.flushes.WithLabelValues(family.String(), string(table), string(kind)).Inc()
			}
		}
	}
}

// ObserveNativeFlush counts one flush record of native tables, first seen at the given time.
func (m *Metrics) ObserveNativeFlush(at time.Time, lost []api.NativeLoss) {
	m.ObserveFlush(at, nil)
	m.ObserveFurtherNativeLoss(lost)
}

// ObserveFurtherNativeLoss counts native tables that were hit while their record was open. The
// record stays one event (ObserveNativeFlush).
func (m *Metrics) ObserveFurtherNativeLoss(lost []api.NativeLoss) {
	for _, l := range lost {
		m.flushes.WithLabelValues(l.Family, l.Table, string(l.Kind)).Inc()
	}
}

// ObserveNativeReplay counts one replay of native tables of one family.
func (m *Metrics) ObserveNativeReplay(family string, result api.Outcome) {
	m.replays.WithLabelValues(family, string(result)).Inc()
}

// ObserveUnprotected counts rules that --protect does not name and that a flush removed from
// one table. unsure means that their number is incomplete or unknown.
func (m *Metrics) ObserveUnprotected(family rules.Family, table rules.TableName, n int, unsure bool) {
	if n > 0 {
		m.flushedUnprotected.WithLabelValues(family.String(), string(table)).Add(float64(n))
	}
	if unsure {
		m.unprotectedUnknown.WithLabelValues(family.String(), string(table)).Inc()
	}
}

// ObserveRecovery records how long the rules were absent, when all of them are proved to be
// back. standby is the standby's translation meanwhile; nil if it did not translate.
func (m *Metrics) ObserveRecovery(absent time.Duration, standby *api.StandbyUse) {
	m.rulesAbsent.Observe(absent.Seconds())
	if standby != nil {
		m.standbyAfter.WithLabelValues().Observe(standby.AfterSeconds)
	}
}

// ObserveReplay counts and times one replay of one family. A skipped replay is counted and not
// timed.
func (m *Metrics) ObserveReplay(family rules.Family, result api.Outcome, took time.Duration) {
	m.replays.WithLabelValues(family.String(), string(result)).Inc()
	if result != reload.Skipped {
		m.replayDuration.WithLabelValues(family.String()).Observe(took.Seconds())
	}
}

// ObserveRestoreFailure counts one refused restore.
func (m *Metrics) ObserveRestoreFailure(family rules.Family, reason iptables.Reason) {
	m.restoreFailures.WithLabelValues(family.String(), string(reason)).Inc()
}

// ObserveDrill counts one drill that has ended, or was refused.
func (m *Metrics) ObserveDrill(result api.DrillResult) {
	m.drills.WithLabelValues(string(result)).Inc()
}

// sweptProtocols returns the protocols whose flows are deleted, by number.
func sweptProtocols() map[uint8]string {
	return map[uint8]string{nat.TCP: "tcp", nat.UDP: "udp", nat.SCTP: "sctp"}
}

// ObserveSweep counts the flows that were deleted after a replay of nat. failed means that the
// search failed or found too many flows.
func (m *Metrics) ObserveSweep(family rules.Family, deleted conntrack.Deleted, failed bool) {
	for number, protocol := range sweptProtocols() {
		if n := deleted.ByProtocol[number]; n > 0 {
			m.flowsEnded.WithLabelValues(family.String(), protocol).Add(float64(n))
		}
	}
	if failed {
		m.sweepErrors.WithLabelValues(family.String()).Inc()
	}
}

// ObserveJournalError counts flush records that are not on disk.
func (m *Metrics) ObserveJournalError() { m.journalErrors.Inc() }

// ObserveStateError counts a write to the state folder that failed.
func (m *Metrics) ObserveStateError() { m.stateErrors.Inc() }

// SetGeneration records how many rules ought to be in force, and since when. Tables that count
// does not name have none.
func (m *Metrics) SetGeneration(captured time.Time, count map[rules.TableID]int) {
	m.generationTime.Set(seconds(captured))
	for _, family := range m.families {
		for _, table := range protect.Tables() {
			m.generationRules.set(family.Table(table), float64(count[family.Table(table)]))
		}
	}
}

// SetStatus sets the gauges that follow a Status, each time the loop publishes one. Nothing may
// change s afterwards, because scrapes read it.
func (m *Metrics) SetStatus(s api.Status) {
	// The loop publishes with each step, and these values rarely change.
	last := m.status.Swap(&s)
	if !slices.Equal(s.PolicyDrops, last.PolicyDrops) {
		m.setPolicyDrops(s.PolicyDrops)
	}
	if len(s.Native)+len(m.native) > 0 {
		m.setNative(s.Native, s.PolicyDrops)
	}
	m.stateSaved.Set(seconds(s.StateSaved))
	if end := s.LastDrill; end != nil {
		m.lastDrill.Set(seconds(end.Time))
		m.lastDrillPassed.Set(truth(end.Result == api.DrillPassed))
	}
	if s.Mode != last.Mode {
		for _, mode := range api.Modes() {
			m.mode.WithLabelValues(string(mode)).Set(truth(mode == s.Mode))
		}
	}
	for family, keeper := range s.Keeper {
		if keeper.State != last.Keeper[family].State {
			m.keeper.set(string(keeper.State), family.String())
		}
	}
	for family, standby := range s.Standby {
		was := last.Standby[family]
		if standby.State != was.State {
			m.standby.set(string(standby.State), family.String())
		}
		if standby.Outstanding != was.Outstanding {
			m.standbyOutstanding.WithLabelValues(family.String()).Set(float64(standby.Outstanding))
		}
	}
}

// ObserveStandby adds the time for which the standby translated a family, when it is shut.
func (m *Metrics) ObserveStandby(family rules.Family, open time.Duration) {
	m.standbyOpen.WithLabelValues(family.String()).Add(open.Seconds())
}

// SetBackend records the backend and the version of iptables, as labels of a series of value 1.
// The daemon calls it when it starts.
func (m *Metrics) SetBackend(info iptables.Info) {
	m.backend.Reset()
	for _, family := range m.families {
		m.backend.WithLabelValues(family.String(), string(info.Backend), info.Version).Set(1)
	}
}

// ObserveSourceError counts an error of a source of generations.
func (m *Metrics) ObserveSourceError(source string) { m.sourceErrors.WithLabelValues(source).Inc() }

// truth returns the value of a gauge that shows a yes or no.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// seconds returns t as a timestamp of Prometheus; the zero time is 0.
func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMicro()) / 1e6
}
