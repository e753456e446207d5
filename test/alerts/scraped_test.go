// Package alerts tests the alerts of deploy/prometheus: their unit tests, their runbook, and
// their behaviour with a running daemon.
package alerts

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"sigs.k8s.io/yaml"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// A scrape each half second represents one each 5 s, so that a test sees minutes within
	// one. All time is stretched, timestamps too.
	scrapeEach = time.Second / 2
	stretch    = 10
	// lead is the number of empty scrapes before the first. promtool's time begins at 0, and
	// there must be a time before the first scrape.
	lead   = 24
	target = `job="canaryd",instance="node-1"`
)

// A history has the scrapes of one daemon, as Prometheus would store them.
type history struct {
	n      *nodetest.Node
	at     []time.Time
	values map[string][]string // by series, in promtool's notation; times are stretched last
	times  map[string][]float64
	wants  []want
}

// A want names the alerts that must fire at one scrape.
type want struct {
	scrape int
	alerts []string
}

// scrape makes that number of scrapes, at scrapeEach.
func (h *history) scrape(times int) {
	h.n.Helper()
	for range times {
		next := time.Now()
		if len(h.at) > 0 {
			next = h.at[len(h.at)-1].Add(scrapeEach)
		}
		testkit.Pass(h.n, time.Until(next), "the time between two scrapes")
		h.once()
	}
}

func (h *history) once() {
	h.n.Helper()
	h.at = append(h.at, time.Now())
	seen := map[string]bool{}
	note := func(name, labels string, v float64) {
		series := fmt.Sprintf("%s{%s}", name, strings.Trim(target+","+labels, ","))
		seen[series] = true
		h.put(series, strconv.FormatFloat(v, 'f', -1, 64))
		if strings.HasSuffix(name, "_time_seconds") || strings.HasSuffix(name, "_timestamp_seconds") {
			for len(h.times[series]) < len(h.at)-1 {
				h.times[series] = append(h.times[series], 0)
			}
			h.times[series] = append(h.times[series], v)
		}
	}
	text, err := nodetest.Fetch("/metrics")
	if err != nil {
		note("up", "", 0)
	} else {
		note("up", "", 1)
		h.parse(text, note)
	}
	for series, values := range h.values {
		if !seen[series] && len(values) == len(h.at)-1 {
			h.put(series, "stale")
		}
	}
}

// put appends a value to a series that may have begun late or had a gap.
func (h *history) put(series, value string) {
	for len(h.values[series]) < len(h.at)-1 {
		h.values[series] = append(h.values[series], "_")
	}
	h.values[series] = append(h.values[series], value)
}

// parse notes every sample of canaryd's own, and the start time of its process.
func (h *history) parse(text string, note func(name, labels string, v float64)) {
	h.n.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	h.n.Must(err)
	for name, family := range families {
		if !strings.HasPrefix(name, "canaryd_") && name != "process_start_time_seconds" {
			continue
		}
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			all := strings.Join(labels, ",")
			if hist := m.GetHistogram(); hist != nil {
				note(name+"_count", all, float64(hist.GetSampleCount()))
				note(name+"_sum", all, hist.GetSampleSum())
				for _, b := range hist.GetBucket() {
					le := strconv.FormatFloat(b.GetUpperBound(), 'g', -1, 64)
					note(name+"_bucket", strings.Trim(all+fmt.Sprintf(",le=%q", le), ","), float64(b.GetCumulativeCount()))
				}
				continue
			}
			note(name, all, m.GetCounter().GetValue()+m.GetGauge().GetValue())
		}
	}
}

// want notes that by the last scrape exactly these alerts fire.
func (h *history) want(alerts ...string) {
	h.wants = append(h.wants, want{len(h.at) - 1, alerts})
}

// stretched converts a time into seconds of promtool's time.
func (h *history) stretched(t float64) float64 {
	if t == 0 {
		return 0 // it never happened
	}
	var scrapes []float64
	for _, at := range h.at {
		scrapes = append(scrapes, float64(at.UnixMicro())/1e6)
	}
	i := max(sort.SearchFloat64s(scrapes, t)-1, 0)
	length := scrapeEach.Seconds()
	if i+1 < len(scrapes) && t > scrapes[0] {
		length = scrapes[i+1] - scrapes[i] // scrapes are never quite in time
	}
	return (lead + float64(i) + (t-scrapes[i])/length) * scrapeEach.Seconds() * stretch
}

// check has promtool evaluate the rules over the scrapes.
func (h *history) check() {
	h.n.Helper()
	rules, err := filepath.Abs(rulesFile)
	h.n.Must(err)
	type sample struct {
		Labels string  `json:"labels"`
		Value  float64 `json:"value"`
	}
	type query struct {
		Expr     string   `json:"expr"`
		EvalTime string   `json:"eval_time"`
		Samples  []sample `json:"exp_samples"`
	}
	step := (scrapeEach * stretch).String()
	var series []map[string]string
	early := compared(h.n.T)
	for name, values := range h.values {
		if late := values[0] == "_"; late && early[name[:strings.IndexByte(name, '{')]] && !strings.Contains(name, "result=") {
			h.n.Errorf("%s was not there from the first scrape on", name)
		}
		for i, t := range h.times[name] {
			if values[i] != "_" && values[i] != "stale" {
				values[i] = strconv.FormatFloat(h.stretched(t), 'f', 6, 64)
			}
		}
		series = append(series, map[string]string{"series": name, "values": strings.Repeat("_ ", lead) + strings.Join(values, " ")})
	}
	var queries []query
	for _, w := range h.wants {
		q := query{Expr: `count by (alertname) (ALERTS{alertstate="firing"})`, EvalTime: (time.Duration(lead+w.scrape) * scrapeEach * stretch).String()}
		for _, name := range w.alerts {
			q.Samples = append(q.Samples, sample{fmt.Sprintf("{alertname=%q}", name), 1})
		}
		queries = append(queries, q)
	}
	text, err := yaml.Marshal(map[string]any{
		"rule_files": []string{rules}, "evaluation_interval": step,
		"tests": []any{map[string]any{"interval": step, "input_series": series, "promql_expr_test": queries}},
	})
	h.n.Must(err)
	path := filepath.Join(h.n.TempDir(), "scraped.yaml")
	h.n.Must(os.WriteFile(path, text, 0o644))
	promtool(h.n.T, "", "test", "rules", path)
	if h.n.Failed() {
		for name, values := range h.values {
			if slices.ContainsFunc(values, func(v string) bool { return v != values[0] }) {
				h.n.Logf("%s %s", name, strings.Join(values, " "))
			}
		}
	}
}

func begin(n *nodetest.Node) *history {
	nstest.NeedProgram(n.T, "promtool")
	return &history{n: n, values: map[string][]string{}, times: map[string][]float64{}}
}

// TestFirstFlushAlerts: on both backends the first flush of a daemon makes its alert fire, and
// no other.
func TestFirstFlushAlerts(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		h := begin(n)
		h.scrape(4)
		h.want()
		n.Flush()
		n.Healed(1)
		h.scrape(2)
		h.want("CanarydFlush")
		d.Stop()
		h.check()
	})
}

// TestDrillsAlertNot: no alert fires for a drill. A drill for real makes the flush's alert
// fire.
func TestDrillsAlertNot(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		h := begin(n)
		h.scrape(4)
		for _, table := range []string{"nat", "filter", "mangle"} {
			n.Want(0, "drill", "--table="+table)
			h.scrape(2)
		}
		h.want()
		n.Want(0, "drill", "--for-real", "--yes")
		h.scrape(2)
		h.want("CanarydFlush")
		d.Stop()
		h.check()
	})
}

// TestFailedDrillAlerts: an alert reports a drill that did not pass, after a restart too, until
// a drill has passed.
func TestFailedDrillAlerts(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		n.Want(0, "drill")
		d.Stop()
		d = n.Start()
		h := begin(n)
		h.scrape(3)
		h.want()
		d.Stop()
		// No drill fails on a healthy node, so the test changes its record.
		const journal, passed = "/run/state/journal.jsonl", `"drill":"canary"`
		text, err := os.ReadFile(journal)
		n.Must(err)
		failed := strings.ReplaceAll(string(text), passed, passed+`,"drillFailed":true`)
		if failed == string(text) {
			n.Fatalf("no drill is in the journal:\n%s", text)
		}
		n.Must(os.WriteFile(journal, []byte(failed), 0o600))
		d = n.Start()
		h.scrape(3)
		h.want() // the drill may be repeated at once
		h.scrape(15)
		h.want("CanarydDrillFailed")
		n.Want(0, "drill")
		h.scrape(3)
		h.want()
		d.Stop()
		h.check()
	})
}

// TestFlushBeforeTheFirstScrapeAlerts: rules are flushed while canaryd is down. canaryd counts
// that before the first scrape, and the alert fires anyway.
func TestFlushBeforeTheFirstScrapeAlerts(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		d.Stop()
		n.Flush()
		d = n.Start()
		n.Healed(1)
		h := begin(n)
		h.scrape(3)
		h.want("CanarydFlush")
		d.Stop()
		h.check()
	})
}

// TestRulesAbsentAlerts: an alert reports rules that are absent for half a minute.
func TestRulesAbsentAlerts(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--mode=observe")
		h := begin(n)
		h.scrape(3)
		h.want()
		n.Flush()
		h.scrape(3)
		h.want("CanarydFlush")
		h.scrape(6)
		h.want("CanarydFlush", "CanarydRulesAbsent")
		d.Stop()
		h.check()
	})
}

// TestAlertsOfALife follows one daemon: flushed, flushed in a pause, resumed,
// cleaned up, and stopped.
func TestAlertsOfALife(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		h := begin(n)
		h.scrape(3)
		h.want()

		n.Flush()
		n.Healed(1)
		h.scrape(3)
		h.want("CanarydFlush")

		n.Want(0, "pause", "--for=1h")
		n.Flush()
		h.scrape(3)
		h.want("CanarydFlush")
		h.scrape(8)
		h.want("CanarydFlush") // rules are missing on purpose in a pause
		n.Want(0, "resume")
		n.Healed(2)
		h.scrape(3)
		h.want("CanarydFlush")

		n.Want(0, "cleanup")
		h.scrape(10)
		h.want("CanarydFlush")
		h.scrape(13)
		h.want("CanarydBlind", "CanarydFlush")

		d.Stop()
		h.scrape(16)
		h.want("CanarydFlush") // the node may restart: CanarydDown takes 15 minutes
		h.check()
	})
}
