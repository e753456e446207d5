package metrics

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// exposition returns canaryd's own metrics in their scraped form.
func exposition(t *testing.T, reg prometheus.Gatherer) []byte {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), namespace+"_") {
			if _, err := expfmt.MetricFamilyToText(&text, family); err != nil {
				t.Fatal(err)
			}
		}
	}
	return text.Bytes()
}

func newTestMetrics(families ...rules.Family) (*prometheus.Registry, *Metrics, *watch.Hints) {
	reg, hints := prometheus.NewRegistry(), watch.NewHints()
	return reg, NewMetrics(reg, MetricsOptions{
		Families: families, Sources: []string{"snapshot"}, Hints: hints.Counts,
		Version: "v1.2.3", Commit: "abcdef0", GoVersion: "go1.26",
	}), hints
}

func TestMetricsOfTheStart(t *testing.T) {
	reg, _, _ := newTestMetrics(rules.IPv4)
	golden.Compare(t, "metrics_start.txt", exposition(t, reg))
}

// everything calls every method once, as after a flush.
func everything(m *Metrics, hints *watch.Hints) {
	at := time.UnixMilli(1_700_000_000_250)

	m.SetBackend(iptables.Info{Backend: iptables.Legacy, Version: "1.8.7"})
	m.SetBackend(iptables.Info{Backend: iptables.NFT, Version: "1.8.9"})
	m.SetGeneration(at.Add(-time.Hour), map[rules.TableID]int{
		rules.IPv4.Table(rules.Nat): 40, rules.IPv4.Table(rules.Filter): 12, rules.IPv6.Table(rules.Nat): 4,
	})
	for _, family := range rules.Families() {
		for _, table := range protect.Always() {
			m.SetCanaryPresent(family, table, family == rules.IPv6)
		}
	}
	hints.Give(watch.SourceNFT)
	hints.Give(watch.SourceNFT)
	m.ObserveProbe(rules.IPv4, ProbeLoss, 30*time.Microsecond)
	m.ObserveProbe(rules.IPv6, ProbeIntact, 20*time.Microsecond)
	m.SetJumpsMissing(rules.IPv4, map[rules.TableName]int{rules.Nat: 3, rules.Filter: 0})
	m.ObserveFlush(at, map[rules.Family]api.Verdicts{
		rules.IPv4: {rules.Nat: canary.Emptied, rules.Filter: canary.ChainDeleted, rules.Mangle: canary.Intact},
		rules.IPv6: {rules.Nat: canary.Unknown},
	})
	m.SetStatus(api.Status{
		Mode: api.Heal, LastKnown: at, LossSince: at, LearningPendingSince: at.Add(time.Second), Paused: true, Contended: true, Backend: api.Backend{Mixed: true, Mismatch: true},
		PolicyDrops: []api.PolicyDrop{{Family: rules.IPv4, Table: rules.Filter, Chain: "INPUT"}},
		Keeper:      map[rules.Family]api.FamilyKeeper{rules.IPv4: {State: api.KeeperIdle}, rules.IPv6: {State: api.KeeperUnavailable}},
		Standby:     map[rules.Family]api.FamilyStandby{rules.IPv4: {State: api.StandbyOpen, Outstanding: 2}, rules.IPv6: {State: api.StandbyIdle}},
	})
	m.ObserveStandby(rules.IPv4, 250*time.Millisecond)
	m.ObserveUnprotected(rules.IPv4, rules.Filter, 6, true)
	m.ObserveSweep(rules.IPv4, conntrack.Deleted{ByProtocol: map[uint8]int{nat.UDP: 3}}, true)
	m.ObserveDrill(api.DrillPassed)
	m.ObserveJournalError()
	m.ObserveStateError()
	m.SetDeclaredRefused(rules.IPv6, rules.Nat, 1)
	m.SetOpaque(rules.IPv4, rules.Mangle, 1)
	m.SetLeftOut(rules.IPv4, rules.Nat, 1)
	m.ObserveRestoreFailure(rules.IPv4, iptables.ReasonMissingSet)
	m.ObserveReplay(rules.IPv4, reload.Proved, 80*time.Millisecond)
	m.ObserveReplay(rules.IPv6, reload.Skipped, 0)
	m.ObserveRecovery(120*time.Millisecond, &api.StandbyUse{AfterSeconds: 0.004})
	m.SetQuarantined(rules.IPv4, rules.Filter, 2)
	m.ObserveSourceError("snapshot")
}

func TestMetricsAfterAFlush(t *testing.T) {
	reg, m, hints := newTestMetrics(rules.Families()...)
	everything(m, hints)
	golden.Compare(t, "metrics_flush.txt", exposition(t, reg))

	m.SetStatus(api.Status{})
	for _, name := range []string{"canaryd_loss_since_timestamp_seconds", "canaryd_paused", "canaryd_mixed_backends", "canaryd_backend_mismatch"} {
		want := "# HELP " + name
		text := string(exposition(t, reg))
		if !strings.Contains(text, want) || !strings.Contains(text, "\n"+name+" 0\n") {
			t.Errorf("%s is not 0 once nothing is wrong", name)
		}
	}
}

// seriesOf returns the names and labels of canaryd's own series.
func seriesOf(t *testing.T, reg prometheus.Gatherer) []string {
	t.Helper()
	var names []string
	for line := range strings.Lines(string(exposition(t, reg))) {
		if !strings.HasPrefix(line, "#") {
			names = append(names, line[:strings.LastIndexByte(line, ' ')])
		}
	}
	return names
}

// TestSeriesAppearWithTheirFirstValue: a value of 0 creates no series. An existing series
// stays, with 0 once its reason is gone.
func TestSeriesAppearWithTheirFirstValue(t *testing.T) {
	reg, m, hints := newTestMetrics(rules.Families()...)
	m.SetBackend(iptables.Info{Backend: iptables.NFT, Version: "1.8.9"})
	quiet := func() {
		for _, family := range rules.Families() {
			for _, table := range protect.Tables() {
				m.SetJumpsMissing(family, map[rules.TableName]int{table: 0})
				m.SetQuarantined(family, table, 0)
				m.SetDeclaredRefused(family, table, 0)
				m.SetOpaque(family, table, 0)
				m.SetLeftOut(family, table, 0)
				m.ObserveUnprotected(family, table, 0, false)
			}
			m.ObserveSweep(family, conntrack.Deleted{}, false)
		}
		m.SetStatus(api.Status{Mode: api.Heal})
	}
	before := seriesOf(t, reg)
	quiet()
	if diff := cmp.Diff(before, seriesOf(t, reg)); diff != "" {
		t.Errorf("series of a node on which nothing happened (-at the start +later):\n%s", diff)
	}
	everything(m, hints)
	wrong := seriesOf(t, reg)
	if len(wrong) <= len(before) {
		t.Fatalf("%d series after a flush, %d before", len(wrong), len(before))
	}
	quiet()
	if diff := cmp.Diff(wrong, seriesOf(t, reg)); diff != "" {
		t.Errorf("series vanished, or appeared late (-after a flush +when all is well again):\n%s", diff)
	}
	for line := range strings.Lines(string(exposition(t, reg))) {
		for _, name := range []string{"quarantined_rules{", "opaque_rules{", "declared_refused{", "chains_left_out{", "jumps_missing{", "policy_drops{"} {
			if strings.HasPrefix(line, namespace+"_"+name) && !strings.HasSuffix(line, " 0\n") {
				t.Errorf("all is well again, and still: %s", line)
			}
		}
	}
}

// TestOneStateAtATime: an earlier state is 0, even if the status lacked the state in between. A
// state that was never entered has no series.
func TestOneStateAtATime(t *testing.T) {
	reg, m, _ := newTestMetrics(rules.IPv4)
	with := func(keeper api.KeeperState, standby api.StandbyState) api.Status {
		return api.Status{
			Keeper:  map[rules.Family]api.FamilyKeeper{rules.IPv4: {State: keeper}},
			Standby: map[rules.Family]api.FamilyStandby{rules.IPv4: {State: standby}},
			Native:  []api.NativeTable{{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Standby: &api.FamilyStandby{State: standby}}},
		}
	}
	for _, s := range []api.Status{with(api.KeeperIdle, api.StandbyBuilding), {}, with(api.KeeperKept, api.StandbyArmed), with(api.KeeperKept, api.StandbyOpen)} {
		m.SetStatus(s)
	}
	var got []string
	for line := range strings.Lines(string(exposition(t, reg))) {
		if strings.Contains(line, "state=") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	want := []string{
		`canaryd_keeper{family="ipv4",state="idle"} 0`,
		`canaryd_keeper{family="ipv4",state="kept"} 1`,
		// One status lacked the table, so its series was removed.
		`canaryd_native_standby{family="ip",state="armed",table="ip kube-proxy"} 0`,
		`canaryd_native_standby{family="ip",state="open",table="ip kube-proxy"} 1`,
		`canaryd_standby{family="ipv4",state="armed"} 0`,
		`canaryd_standby{family="ipv4",state="building"} 0`,
		`canaryd_standby{family="ipv4",state="open"} 1`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("states (-want +got):\n%s", diff)
	}
}

// TestMetricsOfNativeTables: series of native tables exist as long as the table is guarded, but
// their counters stay.
func TestMetricsOfNativeTables(t *testing.T) {
	reg, m, _ := newTestMetrics()
	m.SetStatus(api.Status{NativeOverLimit: 3, Native: []api.NativeTable{
		{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Rules: 1692, Elements: 2246},
		{Family: "inet", Table: "inet netavark", Verdict: canary.Emptied, Rules: 7, Awaiting: true, Unreplayable: "its rules", QuarantinedParts: 2},
		{Family: "inet", Table: "inet firewalld", Verdict: canary.Intact, Immune: true},
	}})
	var native []string
	for line := range strings.Lines(string(exposition(t, reg))) {
		if strings.Contains(line, "native") || strings.Contains(line, "netavark") || strings.Contains(line, "kube-proxy\"") || strings.Contains(line, "awaiting") {
			native = append(native, line)
		}
	}
	golden.Compare(t, "metrics_native.txt", []byte(strings.Join(native, "")))
	m.SetStatus(api.Status{})
	for line := range strings.Lines(string(exposition(t, reg))) {
		if strings.Contains(line, "table=\"i") {
			t.Errorf("a series of a table that is not guarded any more: %s", line)
		}
	}
}

func TestMetricsLint(t *testing.T) {
	reg, _, _ := newTestMetrics(rules.Families()...)
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestMetricsHoldRuntimeToo(t *testing.T) {
	reg, _, _ := newTestMetrics()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	for _, name := range []string{"go_goroutines", "process_cpu_seconds_total", "canaryd_build_info"} {
		if byName[name] == nil {
			t.Errorf("%s is missing", name)
		}
	}
}

// TestMetricsOfTablesOnDemand: raw and security have series from their first canary until they
// hold no protected rules any more. Counters of losses begin at 0 and stay.
func TestMetricsOfTablesOnDemand(t *testing.T) {
	reg, m, _ := newTestMetrics(rules.Families()...)
	id := rules.IPv4.Table(rules.Raw)
	count := func(series string) int { return strings.Count(string(exposition(t, reg)), "\n"+series) }
	zeros := func() {
		m.SetGeneration(time.Unix(1, 0), nil)
		m.SetJumpsMissing(rules.IPv4, map[rules.TableName]int{rules.Raw: 0})
		m.SetCanaryPresent(rules.IPv4, rules.Raw, false)
	}
	zeros()
	for name, want := range map[string]int{
		`canaryd_canary_present{family="ipv4",table="raw"}`: 0, `canaryd_generation_rules{family="ipv4",table="raw"}`: 0,
		`canaryd_flushes_total{family="ipv4",kind="emptied",table="raw"}`: 0,
	} {
		if got := count(name); got != want {
			t.Errorf("on a node without such rules %s has %d series, want %d", name, got, want)
		}
	}
	m.SetCanaryPresent(rules.IPv4, rules.Raw, true)
	m.SetGeneration(time.Unix(1, 0), map[rules.TableID]int{id: 5})
	for _, line := range []string{
		`canaryd_canary_present{family="ipv4",table="raw"} 1`, `canaryd_generation_rules{family="ipv4",table="raw"} 5`,
	} {
		if count(line+"\n") != 1 {
			t.Errorf("%s is missing", line)
		}
	}
	zeros()
	if count(`canaryd_canary_present{family="ipv4",table="raw"} 0`) != 1 {
		t.Error("a canary that is lost is not 0")
	}
	m.ObserveFlush(time.Unix(2, 0), map[rules.Family]api.Verdicts{rules.IPv4: {rules.Raw: canary.Emptied}})
	m.ForgetTable(id)
	zeros()
	if n := count(`canaryd_canary_present{family="ipv4",table="raw"}`); n != 0 {
		t.Errorf("%d series of a table that holds nothing any more", n)
	}
	if count(`canaryd_flushes_total{family="ipv4",kind="emptied",table="raw"} 1`) != 1 {
		t.Error("the counter is gone")
	}
}
