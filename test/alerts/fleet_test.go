package alerts

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// A fleet has the samples that Prometheus scraped from many nodes of one cluster.
type fleet struct {
	scrape time.Duration
	nodes  []*fleetNode
}

// A fleetNode is one node of a fleet: its series, and the times of its canaryd's start and last
// look.
type fleetNode struct {
	name    string
	samples map[string][]string
	started time.Duration
	looked  bool
}

func newFleet(size int, scrape time.Duration) *fleet {
	f := &fleet{scrape: scrape}
	for i := range size {
		f.nodes = append(f.nodes, &fleetNode{name: fmt.Sprintf("n%d", i), samples: map[string][]string{}})
	}
	return f
}

// A phase is the state of a node's target at one scrape.
type phase int

const (
	runs  phase = iota
	down        // the pod has an address, and no process answers
	ended       // there is no pod, so Prometheus has no target
)

// pass adds one scrape; state returns the state of each node.
func (f *fleet) pass(state func(node int) phase) {
	for i, n := range f.nodes {
		at := f.now(n)
		now := state(i)
		put := func(series, value string) { n.samples[series] = append(n.samples[series], value) }
		put(`kube_node_info{job="kube-state-metrics",instance="ksm",cluster="one",node="`+n.name+`",os_image="Debian"}`, "1")
		put(n.series("up", ""), map[phase]string{runs: "1", down: "0", ended: "stale"}[now])
		if now != runs {
			n.started, n.looked = at+f.scrape, false
		}
		for series, value := range n.exported(at) {
			if now != runs {
				value = "stale"
			}
			put(series, value)
		}
		n.looked = now == runs
	}
}

func (f *fleet) now(n *fleetNode) time.Duration {
	return time.Duration(len(n.samples[n.series("up", "")])) * f.scrape
}

func (n *fleetNode) series(name, labels string) string {
	return name + `{` + strings.TrimSuffix(`job="kube-system/canaryd",cluster="one",instance="`+n.name+`",node="`+n.name+`",`+labels, ",") + `}`
}

// exported returns a healthy node's samples of the series that alerts query. The first scrape
// precedes canaryd's first look at the tables.
func (n *fleetNode) exported(at time.Duration) map[string]string {
	looked := fmt.Sprint(at.Seconds())
	if !n.looked {
		looked = "0"
	}
	all := map[string]string{
		n.series("canaryd_last_examination_timestamp_seconds", ""):          looked,
		n.series("process_start_time_seconds", ""):                          fmt.Sprint(max(n.started.Seconds()-2, 0)),
		n.series("canaryd_build_info", `version="1"`):                       "1",
		n.series("canaryd_generation_rules", `family="ipv4",table="nat"`):   map[bool]string{true: "400", false: "0"}[n.looked],
		n.series("canaryd_replays_total", `family="ipv4",result="failed"`):  "0",
		n.series("canaryd_replays_total", `family="ipv4",result="partial"`): "0",
		n.series("canaryd_rules_absent_seconds_bucket", `le="30"`):          "0",
		n.series("canaryd_source_errors_total", `source="snapshot"`):        "0",
		n.series("canaryd_canary_present", `family="ipv4",table="nat"`):     "1",
	}
	for _, name := range []string{"flush_events_total", "last_flush_timestamp_seconds", "loss_since_timestamp_seconds", "rules_absent_seconds_count", "capture_pending_since_timestamp_seconds",
		"journal_errors_total", "state_errors_total", "paused", "contended", "awaiting_decision", "nothing_protected", "rules_without_owner", "mixed_backends", "backend_mismatch",
		"native_tables_not_guarded", "last_drill_passed", "last_drill_timestamp_seconds"} {
		all[n.series("canaryd_"+name, "")] = "0"
	}
	return all
}

// A moment is a time, and the result that a query of ALERTS by name must have then.
type moment struct {
	at     time.Duration
	query  string
	alerts map[string]float64
}

// want has promtool evaluate the alerts over the fleet's time.
func (f *fleet) want(t *testing.T, moments ...moment) {
	t.Helper()
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var series []map[string]string
	for _, n := range f.nodes {
		for name, values := range n.samples {
			series = append(series, map[string]string{"series": name, "values": strings.Join(values, " ")})
		}
	}
	var queries []map[string]any
	for _, m := range moments {
		samples := []map[string]any{}
		for name, n := range m.alerts {
			samples = append(samples, map[string]any{"labels": fmt.Sprintf("{alertname=%q}", name), "value": n})
		}
		queries = append(queries, map[string]any{"expr": m.query, "eval_time": m.at.String(), "exp_samples": samples})
	}
	text, err := yaml.Marshal(map[string]any{
		"rule_files": []string{rules}, "evaluation_interval": "15s",
		"tests": []any{map[string]any{"interval": f.scrape.String(), "input_series": series, "promql_expr_test": queries}},
	})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	promtool(t, "", "test", "rules", path)
}

// Queries of the alerts that fire now, that have ever fired, and of CanarydDown if it was ever
// pending.
const (
	firing = `count by (alertname) (ALERTS{alertstate="firing"})`
	fired  = `count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[3h]))`
	nearly = `count by (alertname) (count_over_time(ALERTS{alertname="CanarydDown",alertstate="pending"}[3h]))`
)

// TestUpgradeAlertsNot: the DaemonSet replaces 30 pods, a tenth at a time. Each node has no
// target for one scrape. Then its target is down during the pull of the image. Then there is
// one scrape before its canaryd has looked. No alert fires, however long scrape interval and
// pull are. An image that does not start stops the rollout, and an alert reports that.
func TestUpgradeAlertsNot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ scrape, pull time.Duration }{
		{15 * time.Second, time.Minute},
		{30 * time.Second, 4 * time.Minute},
		{time.Minute, 8 * time.Minute},
	} {
		t.Run(fmt.Sprintf("scrape=%s,pull=%s", c.scrape, c.pull), func(t *testing.T) {
			t.Parallel()
			const size, share, begins = 30, 3, 15 * time.Minute
			pull := int(c.pull / c.scrape)
			for _, good := range []bool{true, false} {
				f := newFleet(size, c.scrape)
				for f.now(f.nodes[0]) < begins {
					f.pass(func(int) phase { return runs })
				}
				for wave := range size / share {
					for step := range pull + 2 {
						f.pass(func(node int) phase {
							switch mine := good && node/share == wave || !good && node < share; {
							case mine && step == 0 && (good || wave == 0):
								return ended
							case mine && (step <= pull || !good):
								return down
							}
							return runs
						})
					}
					if !good && f.now(f.nodes[0]) > begins+13*time.Minute {
						break
					}
				}
				end := f.now(f.nodes[0]) - c.scrape
				if good {
					f.want(t, moment{end, fired, nil}, moment{end, nearly, map[string]float64{"CanarydDown": size}})
				} else {
					f.want(t, moment{begins + 13*time.Minute, firing, map[string]float64{"CanarydDownOnManyNodes": 1}})
				}
			}
		})
	}
}

// TestUninstallAlertsNot: in the documented way all pods lose their port at the same time, so
// Prometheus loses its targets. The same apply empties the PrometheusRule. The operator passes
// that on within a minute, and CanarydAbsent fires only after five.
func TestUninstallAlertsNot(t *testing.T) {
	t.Parallel()
	const began = 20 * time.Minute
	f := newFleet(40, 30*time.Second)
	for f.now(f.nodes[0]) < began {
		f.pass(func(int) phase { return runs })
	}
	for f.now(f.nodes[0]) < began+10*time.Minute {
		f.pass(func(int) phase { return ended })
	}
	f.want(t,
		moment{began + 4*time.Minute + 30*time.Second, fired, nil},
		moment{began + 6*time.Minute, firing, map[string]float64{"CanarydAbsent": 1}}) // if the alerts stay
}
