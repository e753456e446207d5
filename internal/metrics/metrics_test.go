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
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// exposition returns canaryd's own metrics as they are scraped.
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

func TestMetricsAreAllThereFromTheStart(t *testing.T) {
	reg, _, _ := newTestMetrics(rules.IPv4)
	golden.Compare(t, "metrics_start.txt", exposition(t, reg))
}

// everything has every method called once, as after a flush.
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
	m.SetStatus(api.Status{Mode: api.Heal, LastKnown: at, LossSince: at, LearningPendingSince: at.Add(time.Second), Paused: true, Contended: true, Backend: api.Backend{Mixed: true, Mismatch: true}})
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

// TestMetricsAreNeverBornLate: whatever happens, no series appears that was not
// there from the start, but for the backend, which is found out.
func TestMetricsAreNeverBornLate(t *testing.T) {
	reg, m, hints := newTestMetrics(rules.Families()...)
	series := func() []string {
		var names []string
		for line := range strings.Lines(string(exposition(t, reg))) {
			if name := line[:strings.LastIndexByte(line, ' ')]; !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "canaryd_backend_info{") {
				names = append(names, name)
			}
		}
		return names
	}
	before := series()
	everything(m, hints)
	if diff := cmp.Diff(before, series()); diff != "" {
		t.Errorf("series were born late (-at the start +after a flush):\n%s", diff)
	}
}

// TestMetricsOfNativeTables: series of native tables are there as long as the table is guarded, but
// for the counters, which stay.
func TestMetricsOfNativeTables(t *testing.T) {
	reg, m, _ := newTestMetrics()
	m.SetStatus(api.Status{NativeBeyond: 3, Native: []api.NativeTable{
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
		if strings.Contains(line, "table=\"i") && !strings.HasPrefix(line, "canaryd_flushes_total") {
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

// TestMetricsOfTablesOnDemand: raw and security have series from their first canary until they hold
// nothing protected any more. Counters of losses begin at 0 and stay.
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
		`canaryd_flushes_total{family="ipv4",kind="emptied",table="raw"} 0`,
	} {
		if count(line+"\n") != 1 {
			t.Errorf("%s is missing", line)
		}
	}
	zeros()
	if count(`canaryd_canary_present{family="ipv4",table="raw"} 0`) != 1 {
		t.Error("a canary that is lost is not 0")
	}
	m.ForgetTable(id)
	zeros()
	if n := count(`canaryd_canary_present{family="ipv4",table="raw"}`); n != 0 {
		t.Errorf("%d series of a table that holds nothing any more", n)
	}
	if count(`canaryd_flushes_total{family="ipv4",kind="emptied",table="raw"} 0`) != 1 {
		t.Error("the counter is gone")
	}
}
