package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/pkg/watch"
)

// namespace begins the name of every metric.
const namespace = "canaryd"

// A builder creates metrics and registers them, so that none can be forgotten.
type builder struct{ reg prometheus.Registerer }

func register[C prometheus.Collector](b builder, c C) C {
	b.reg.MustRegister(c)
	return c
}

func (b builder) counter(name, help string) prometheus.Counter {
	return register(b, prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}))
}

func (b builder) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return register(b, prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels))
}

func (b builder) gauge(name, help string) prometheus.Gauge {
	return register(b, prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}))
}

func (b builder) gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return register(b, prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels))
}

func (b builder) histogram(name, help string, buckets []float64) prometheus.Histogram {
	return register(b, prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}))
}

func (b builder) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return register(b, prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels))
}

// A hintCollector reads the counters of the hints at each scrape. So a hint costs one atomic
// addition, and its package does not import Prometheus.
type hintCollector struct {
	counts func() map[watch.Source]uint64
	desc   *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (h hintCollector) Describe(descs chan<- *prometheus.Desc) { descs <- h.desc }

// Collect implements prometheus.Collector.
func (h hintCollector) Collect(metrics chan<- prometheus.Metric) {
	var counts map[watch.Source]uint64
	if h.counts != nil {
		counts = h.counts()
	}
	for _, s := range watch.Sources() {
		metrics <- prometheus.MustNewConstMetric(h.desc, prometheus.CounterValue, float64(counts[s]), string(s))
	}
}
