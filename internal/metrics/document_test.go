package metrics

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	metricsDoc = "../../docs/metrics.md"
	beginTable = "<!-- metrics: go test ./internal/metrics -run TestMetricsDocument -update -->\n"
	endTable   = "<!-- end -->\n"
)

// TestMetricsDocument: docs/metrics.md lists the exported metrics with the code's help texts
// and their initial label values. With -update the test writes the list again; the text around
// it is written by hand.
func TestMetricsDocument(t *testing.T) {
	text, err := os.ReadFile(metricsDoc)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begun := strings.Cut(string(text), beginTable)
	_, after, ended := strings.Cut(rest, endTable)
	if !begun || !ended {
		t.Fatalf("%s lacks the lines between which its list stands:\n%s%s", metricsDoc, beginTable, endTable)
	}
	want := before + beginTable + metricsTable(t) + endTable + after
	if golden.Update() {
		if err := os.WriteFile(metricsDoc, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s is not what the code exports (-code +document); -update writes it anew:\n%s", metricsDoc, diff)
	}
}

// metricsTable returns the rows of docs/metrics.md. The text above them has the values of family
// and table, and says that names in _total are counters.
func metricsTable(t *testing.T) string {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg, MetricsOptions{Families: rules.Families(), Sources: []string{"snapshot", "manifest", "rules-dir"}, Hints: watch.NewHints().Counts})
	complete(m)
	type metric struct {
		kind, help string
		labels     map[string]map[string]bool
	}
	metrics := map[string]metric{}
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		m.SetBackend(iptables.Info{Backend: backend})
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			name := f.GetName()
			if !strings.HasPrefix(name, namespace+"_") {
				continue
			}
			if metrics[name].labels == nil {
				metrics[name] = metric{strings.ToLower(f.GetType().String()), f.GetHelp(), map[string]map[string]bool{}}
			}
			for _, series := range f.GetMetric() {
				for _, l := range series.GetLabel() {
					values := metrics[name].labels[l.GetName()]
					if values == nil {
						values = map[string]bool{}
						metrics[name].labels[l.GetName()] = values
					}
					if l.GetValue() != "" { // a version may be anything
						values[l.GetValue()] = true
					}
				}
			}
		}
	}
	for _, name := range registered(t, reg) {
		if _, listed := metrics[name]; !listed {
			t.Errorf("%s has no series in complete, so the list would lack it", name)
		}
	}
	text := "| metric and labels | meaning |\n|---|---|\n"
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		help, labels := m.help, strings.Join(slices.Sorted(maps.Keys(m.labels)), ",")
		if labels != "" {
			labels = "{" + labels + "}"
		}
		if m.kind == "histogram" {
			help += " Histogram."
		}
		for _, label := range slices.Sorted(maps.Keys(m.labels)) {
			if values := slices.Sorted(maps.Keys(m.labels[label])); len(values) > 0 && !slices.Contains([]string{"family", "table", "backend", "mode"}, label) {
				help += " " + label + ": " + strings.Join(values, ", ")
			}
		}
		text += fmt.Sprintf("| `%s%s` | %s |\n", name, labels, help)
	}
	return text
}

// registered returns the names of all of canaryd's metrics, with series or without.
func registered(t *testing.T, reg *prometheus.Registry) []string {
	t.Helper()
	descs := make(chan *prometheus.Desc, 1000)
	reg.Describe(descs)
	close(descs)
	var names []string
	for desc := range descs {
		if name := regexp.MustCompile(`^Desc\{fqName: "(` + namespace + `_[a-z_]+)"`).FindStringSubmatch(desc.String()); name != nil {
			names = append(names, name[1])
		}
	}
	if len(names) < 40 {
		t.Fatalf("only %d metrics are registered", len(names))
	}
	return names
}

// complete creates every possible series, those of native tables without their names.
func complete(m *Metrics) {
	create(m.drills, api.DrillResults())
	m.standbyAfter.WithLabelValues()
	for _, family := range m.families {
		f := family.String()
		for _, table := range protect.Tables() {
			t := string(table)
			create(m.flushes, canary.LossKinds(), f, t)
			m.flushedUnprotected.WithLabelValues(f, t)
			m.unprotectedUnknown.WithLabelValues(f, t)
			for _, gauge := range []tableGauges{m.canaryPresent, m.jumpsMissing, m.generationRules, m.quarantined, m.declaredRefused, m.leftOut, m.opaque, m.policyDrops} {
				gauge.set(family.Table(table), 1)
			}
		}
		create(m.replays, reload.Outcomes(), f)
		create(m.restoreFailures, iptables.Reasons(), f)
		create(m.probes, []ProbeResult{ProbeIntact, ProbeLoss, ProbeUnknown}, f)
		create(m.keeper, api.KeeperStates(), f)
		create(m.standby, api.StandbyStates(), f)
		create(m.flowsEnded, slices.Collect(maps.Values(sweptProtocols())), f)
		m.sweepErrors.WithLabelValues(f)
		m.standbyOutstanding.WithLabelValues(f)
		m.standbyOpen.WithLabelValues(f)
	}
	for _, vec := range []*prometheus.GaugeVec{m.nativeInForce, m.nativeElements, m.nativeRefused, m.nativeWitness} {
		vec.WithLabelValues("", "")
	}
	create(m.nativeStandby, api.StandbyStates(), "", "")
}
