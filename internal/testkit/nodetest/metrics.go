package nodetest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics returns the samples of /metrics by name{label="value"}, without the prefix canaryd_ and
// with sorted labels.
func (n *Node) Metrics() map[string]float64 {
	n.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(n.Get("/metrics")))
	n.Must(err)
	samples := map[string]float64{}
	for name, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			slices.Sort(labels)
			key := strings.TrimPrefix(name, "canaryd_") + "{" + strings.Join(labels, ",") + "}"
			samples[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return samples
}

// Sum adds the samples whose names begin with prefix and contain all of the words.
func Sum(samples map[string]float64, prefix string, words ...string) float64 {
	var total float64
	for name, value := range samples {
		if strings.HasPrefix(name, prefix) && !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(name, w) }) {
			total += value
		}
	}
	return total
}
