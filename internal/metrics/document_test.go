package metrics

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

const (
	metricsDoc = "../../docs/metrics.md"
	beginTable = "<!-- begin of what go test ./internal/metrics -run TestMetricsDocument -update writes -->\n"
	endTable   = "<!-- end -->\n"
)

// TestMetricsDocument: docs/metrics.md lists what the code exports, with the help
// that the code gives and the label values that are there from the start. With
// -update the list is written again; what stands around it is written by hand.
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

// metricsTable returns the rows of docs/metrics.md.
func metricsTable(t *testing.T) string {
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg, MetricsOptions{Families: rules.Families(), Sources: []string{"snapshot", "manifest", "rules-dir"}, Hints: watch.NewHints().Counts})
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
	text := "| metric | type | labels | meaning |\n|---|---|---|---|\n"
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		var labels []string
		for _, label := range slices.Sorted(maps.Keys(m.labels)) {
			if values := slices.Sorted(maps.Keys(m.labels[label])); len(values) > 0 {
				label += ": " + strings.Join(values, ", ")
			}
			labels = append(labels, label)
		}
		text += fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, m.kind, strings.Join(labels, "; "), m.help)
	}
	return text
}
