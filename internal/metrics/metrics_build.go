package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// namespace begins the name of every metric.
const namespace = "canaryd"

// A builder creates metrics and registers them, so that no metric stays unregistered.
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

// tableGauges are gauges with the labels family and table. A series appears with the first
// value other than 0, and stays.
type tableGauges struct {
	*prometheus.GaugeVec
	mu   *sync.Mutex
	made map[rules.TableID]prometheus.Gauge // looked up once: the loop sets them with each step
}

func (b builder) tableGauges(name, help string) tableGauges {
	return tableGauges{b.gauges(name, help, "family", "table"), &sync.Mutex{}, map[rules.TableID]prometheus.Gauge{}}
}

// set sets the gauge of a table. A table that had only 0 so far gets no series. Several
// goroutines may call it.
func (g tableGauges) set(id rules.TableID, value float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gauge, made := g.made[id]
	if !made {
		if value == 0 {
			return
		}
		gauge = g.WithLabelValues(id.Family.String(), string(id.Name))
		g.made[id] = gauge
	}
	gauge.Set(value)
}

// forget removes the series of a table; the next set other than 0 makes it again.
func (g tableGauges) forget(id rules.TableID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.made, id)
	g.DeleteLabelValues(id.Family.String(), string(id.Name))
}

// stateGauges are gauges with a label state after the others: 1 is the present state. States
// that were never entered have no series, and earlier states are 0.
type stateGauges struct {
	*prometheus.GaugeVec
	mu   *sync.Mutex
	last map[string]string // present states, by the last of the other labels
}

func (b builder) stateGauges(name, help string, labels ...string) stateGauges {
	return stateGauges{b.gauges(name, help, append(labels, "state")...), &sync.Mutex{}, map[string]string{}}
}

// set records the present state of the object with these labels. The previous state becomes 0.
// The last label is the object's key.
func (g stateGauges) set(state string, labels ...string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := labels[len(labels)-1]
	if was := g.last[key]; was != "" {
		g.WithLabelValues(append(labels, was)...).Set(0)
	}
	g.WithLabelValues(append(labels, state)...).Set(1)
	g.last[key] = state
}

// forget removes the series of the native table with this name.
func (g stateGauges) forget(table string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.DeletePartialMatch(prometheus.Labels{"table": table})
	delete(g.last, table)
}

func (b builder) histogram(name, help string, buckets []float64) prometheus.Histogram {
	return register(b, prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}))
}

func (b builder) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return register(b, prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels))
}

// hints registers the counters of hints, which are read at each scrape. So a hint costs one
// atomic addition, and its package does not import Prometheus.
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
