package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/pkg/rules"
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

// tableGauges are gauges with the labels family and table. Those of the guarded tables are looked
// up once: the loop sets them with each step.
type tableGauges struct {
	*prometheus.GaugeVec
	of map[rules.TableID]prometheus.Gauge // never changes after NewMetrics
	// onDemand has the series of tables that are guarded on demand, as long as there are any.
	onDemand *sync.Map
}

func (b builder) tableGauges(name, help string) tableGauges {
	return tableGauges{b.gauges(name, help, "family", "table"), map[rules.TableID]prometheus.Gauge{}, &sync.Map{}}
}

func (g tableGauges) set(id rules.TableID, value float64) {
	gauge, known := g.of[id]
	if !known {
		// Most nodes have nothing in such a table, and no series of zeros.
		if value == 0 && !g.has(id) {
			return
		}
		g.onDemand.Store(id, nil)
		gauge = g.WithLabelValues(id.Family.String(), string(id.Name))
	}
	gauge.Set(value)
}

// has reports whether a table that is guarded on demand has a series.
func (g tableGauges) has(id rules.TableID) bool { _, born := g.onDemand.Load(id); return born }

// forget removes the series of a table that is guarded on demand.
func (g tableGauges) forget(id rules.TableID) {
	if _, born := g.onDemand.LoadAndDelete(id); born {
		g.DeleteLabelValues(id.Family.String(), string(id.Name))
	}
}

func (b builder) histogram(name, help string, buckets []float64) prometheus.Histogram {
	return register(b, prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}))
}

func (b builder) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return register(b, prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels))
}

// hints registers the counters of hints, which are read at each scrape. So a hint costs one atomic
// addition, and its package does not import Prometheus.
func (b builder) hints(counts func() map[watch.Source]uint64) {
	for _, source := range watch.Sources() {
		register(b, prometheus.NewCounterFunc(prometheus.CounterOpts{
			Namespace: namespace, Name: "hints_total", Help: "Reasons to look, by where they came from.", ConstLabels: prometheus.Labels{"source": string(source)},
		}, func() float64 {
			if counts == nil {
				return 0
			}
			return float64(counts()[source])
		}))
	}
}
