package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const file = "../../deploy/grafana/canaryd.json"

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestDashboardIsCurrent: the file equals the program's output.
func TestDashboardIsCurrent(t *testing.T) {
	want, err := Render()
	if err != nil {
		t.Fatal(err)
	}
	if golden.Update() {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(want), read(t, file)); diff != "" {
		t.Errorf("%s is not what hack/dashboard prints (-want +got); make dashboard writes it:\n%s", file, diff)
	}
}

// A board has the fields of a dashboard that the tests check.
type board struct {
	UID           string `json:"uid"`
	Title         string `json:"title"`
	SchemaVersion int    `json:"schemaVersion"`
	Templating    struct {
		List []struct {
			Name, Type string
			Definition string
		} `json:"list"`
	} `json:"templating"`
	Annotations struct {
		List []struct{ Expr string } `json:"list"`
	} `json:"annotations"`
	Panels []struct {
		ID      int                      `json:"id"`
		Title   string                   `json:"title"`
		Type    string                   `json:"type"`
		GridPos struct{ X, Y, W, H int } `json:"gridPos"`
		Targets []struct {
			Expr       string            `json:"expr"`
			RefID      string            `json:"refId"`
			Datasource map[string]string `json:"datasource"`
		} `json:"targets"`
	} `json:"panels"`
}

func load(t *testing.T) board {
	t.Helper()
	var b board
	if err := json.Unmarshal([]byte(read(t, file)), &b); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return b
}

// TestDashboardCanBeImported: the dashboard has all fields that Grafana needs, and no two
// panels are in one place.
func TestDashboardCanBeImported(t *testing.T) {
	b := load(t)
	if b.UID != "canaryd" || b.Title == "" || b.SchemaVersion != schema {
		t.Errorf("uid %q, title %q, schema version %d", b.UID, b.Title, b.SchemaVersion)
	}
	variables := map[string]string{}
	for _, v := range b.Templating.List {
		variables[v.Name] = v.Type
	}
	if diff := cmp.Diff(map[string]string{"datasource": "datasource", "cluster": "query", "job": "query", "instance": "query", "node": "query"}, variables); diff != "" {
		t.Errorf("variables (-want +got):\n%s", diff)
	}
	taken, ids, titles := map[[2]int]string{}, map[int]bool{}, map[string]bool{}
	for _, p := range b.Panels {
		if ids[p.ID] || titles[p.Title] || p.ID == 0 || p.Title == "" {
			t.Errorf("panel %d %q has another one's name or number, or none", p.ID, p.Title)
		}
		ids[p.ID], titles[p.Title] = true, true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= columns {
					t.Fatalf("%q covers %q or leaves the grid at %d, %d", p.Title, other, x, y)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type != "text" && p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("%q asks nothing", p.Title)
		}
		for _, target := range p.Targets {
			if target.Datasource["uid"] != "${datasource}" || target.RefID == "" {
				t.Errorf("%q asks %q under %q", p.Title, target.Datasource, target.RefID)
			}
		}
	}
}

// TestDashboardAsksForWhatIsExported: every metric in the dashboard is exported, every selector
// uses the chosen nodes, and Prometheus can parse every expression.
func TestDashboardAsksForWhatIsExported(t *testing.T) {
	known := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(canaryd_[a-z_]+)`).FindAllString(read(t, "../../internal/metrics/testdata/metrics_flush.txt")+read(t, "../../internal/metrics/testdata/metrics_native.txt"), -1) {
		known[m] = true
	}
	b := load(t)
	asked := map[string][]string{}
	for _, p := range b.Panels {
		for _, target := range p.Targets {
			asked[p.Title] = append(asked[p.Title], target.Expr)
		}
	}
	for _, a := range b.Annotations.List {
		asked["annotations"] = append(asked["annotations"], a.Expr)
	}
	var rules strings.Builder
	rules.WriteString("groups: [{name: dashboard, rules: [\n")
	n := 0
	for title, exprs := range asked {
		for _, expr := range exprs {
			for _, m := range regexp.MustCompile(`([a-z_]+_[a-z_]+)\{([^}]*)\}`).FindAllStringSubmatch(expr, -1) {
				if strings.HasPrefix(m[1], "canaryd_") && !known[m[1]] {
					t.Errorf("%q asks for %s, which is not exported", title, m[1])
				}
				if !strings.Contains(m[2], nodes) && !strings.Contains(m[2], one) {
					t.Errorf("%q asks for %s of all nodes, chosen or not", title, m[1])
				}
			}
			if bare := regexp.MustCompile(`canaryd_[a-z_]+(?:[^a-z_{]|$)`).FindString(expr); bare != "" {
				t.Errorf("%q asks for %s of all nodes, chosen or not", title, bare)
			}
			n++
			text, err := json.Marshal(strings.NewReplacer("$__rate_interval", "5m", "$__range", "6h", "$__interval", "15s").Replace(expr))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&rules, "{record: 'panel:%d', expr: %s},\n", n, text)
		}
	}
	rules.WriteString("]}]\n")
	if n < len(b.Panels) {
		t.Errorf("%d expressions in %d panels", n, len(b.Panels))
	}
	nstest.NeedProgram(t, "promtool")
	path := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(path, []byte(rules.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("Prometheus cannot parse an expression: %v\n%s\n%s", err, out, rules.String())
	}
}

// evaluate makes promtool evaluate expressions at minute 9 of a test's series, and returns
// samples by expression.
func evaluate(t *testing.T, series map[string]string, want map[string]string) {
	t.Helper()
	nstest.NeedProgram(t, "promtool")
	var file strings.Builder
	file.WriteString("evaluation_interval: 15s\ntests:\n- interval: 15s\n  input_series:\n")
	for name, values := range series {
		fmt.Fprintf(&file, "  - {series: '%s', values: '%s'}\n", name, values)
	}
	file.WriteString("  promql_expr_test:\n")
	chosen := strings.NewReplacer("$__rate_interval", "1m", "$__range", "5m", "$__interval", "15s", "$cluster", ".*", "$job", ".*", "$instance", ".*", "$node", "a")
	for expr, samples := range want {
		text, err := json.Marshal(chosen.Replace(expr))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&file, "  - {expr: %s, eval_time: 9m, exp_samples: [%s]}\n", text, samples)
	}
	path := filepath.Join(t.TempDir(), "series.yaml")
	if err := os.WriteFile(path, []byte(file.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%.6000s\n%s", err, out, file.String())
	}
}

// TestDashboardSeesTheFirst: a series that appears with its first value counts as if it had
// been 0 before. A node that is new to Prometheus counts nothing.
func TestDashboardSeesTheFirst(t *testing.T) {
	flushes := increases("kind", "canaryd_flushes_total", nodes)
	const (
		scraped = `canaryd_flush_events_total{job="canaryd",instance="a"}`
		emptied = `canaryd_flushes_total{job="canaryd",instance="a",family="ipv4",table="nat",kind="emptied"}`
	)
	for name, c := range map[string]struct {
		series map[string]string
		want   string
	}{
		"nothing was flushed":           {map[string]string{scraped: "0x40"}, `{labels: '{kind="none"}', value: 0}`},
		"the first of its kind":         {map[string]string{scraped: "0x34 1x10", emptied: "_x34 1x10"}, `{labels: '{kind="emptied"}', value: 1}`},
		"two at the same time":          {map[string]string{scraped: "0x34 1x10", emptied: "_x34 2x10"}, `{labels: '{kind="emptied"}', value: 2}`},
		"the first, and it grows":       {map[string]string{scraped: "0x34 1x10", emptied: "_x34 1 2x10"}, `{labels: '{kind="emptied"}', value: 2}`},
		"long ago":                      {map[string]string{scraped: "0x10 1x40", emptied: "_x10 1x40"}, `{labels: '{kind="emptied"}', value: 0}`},
		"a node that has just been met": {map[string]string{scraped: "_x34 7x10", emptied: "_x34 7x10"}, `{labels: '{kind="emptied"}', value: 0}`},
		"canaryd started again":         {map[string]string{scraped: "7x20 0x13 1x10", emptied: "7x20 stale _x13 1x10"}, `{labels: '{kind="emptied"}', value: 1}`},
	} {
		t.Run(name, func(t *testing.T) { evaluate(t, c.series, map[string]string{flushes: c.want}) })
	}
}

// TestDashboardAtRest: a panel of a node without any event says so, and not "No data".
func TestDashboardAtRest(t *testing.T) {
	series := map[string]string{
		`process_cpu_seconds_total{job="canaryd",instance="a"}`:     "1+1x40",
		`process_resident_memory_bytes{job="canaryd",instance="a"}`: "1x40",
		`up{job="canaryd",instance="a"}`:                            "1x40",
		// These are for every node, in any state.
		`canaryd_standby{job="canaryd",instance="a",family="ipv4",state="armed"}`: "1x40",
	}
	for _, s := range regexp.MustCompile(`(?m)^([a-z_]+)(?:\{(.*)\})? [^ ]+$`).FindAllStringSubmatch(read(t, "../../internal/metrics/testdata/metrics_start.txt"), -1) {
		series[strings.Replace(s[1]+`{job="canaryd",instance="a",`+s[2]+"}", ",}", "}", 1)] = "0x40"
	}
	want := map[string]string{}
	for _, p := range load(t).Panels {
		var answers []string
		for _, target := range p.Targets {
			answers = append(answers, "(count("+target.Expr+") or vector(0))")
		}
		// Nothing was flushed, so no node is ranked.
		if len(answers) > 0 && p.Type != "table" {
			want[strings.Join(answers, " + ")+" >= bool 1"] = `{labels: '{}', value: 1}`
		}
	}
	evaluate(t, series, want)
}

// TestDashboardOfAFleet: for any trouble on any number of nodes, an expression has few enough
// answers for a person to read and a browser to draw.
func TestDashboardOfAFleet(t *testing.T) {
	nstest.NeedProgram(t, "promtool")
	const fleet, readable = 30, 24
	var file strings.Builder
	file.WriteString("evaluation_interval: 15s\ntests:\n- interval: 15s\n  input_series:\n")
	series := regexp.MustCompile(`(?m)^([a-z_]+)(?:\{(.*)\})? [^ ]+$`).FindAllStringSubmatch(read(t, "../../internal/metrics/testdata/metrics_flush.txt"), -1)
	for n := range fleet {
		for _, s := range series {
			labels := fmt.Sprintf(`job="canaryd",cluster="one",instance="node-%d:9475"`, n)
			if s[2] != "" {
				labels += "," + s[2]
			}
			fmt.Fprintf(&file, "  - {series: '%s{%s}', values: '1+%dx40'}\n", s[1], labels, n+1) // everything is wrong everywhere
		}
		for _, name := range []string{"process_cpu_seconds_total", "process_resident_memory_bytes"} {
			fmt.Fprintf(&file, "  - {series: '%s{job=\"canaryd\",cluster=\"one\",instance=\"node-%d:9475\"}', values: '1+1x40'}\n", name, n)
		}
		fmt.Fprintf(&file, "  - {series: 'up{job=\"canaryd\",cluster=\"one\",instance=\"node-%d:9475\"}', values: '0x40'}\n", n)
	}
	file.WriteString("  promql_expr_test:\n")
	chosen := strings.NewReplacer("$__rate_interval", "5m", "$__range", "5m", "$__interval", "15s", "$cluster", ".*", "$job", ".*", "$instance", ".*", "$node", "node-7:9475")
	for _, p := range load(t).Panels {
		if len(p.Targets) == 0 {
			continue
		}
		var answers []string
		for _, target := range p.Targets {
			answers = append(answers, "(count("+target.Expr+") or vector(0))")
		}
		all := "(" + strings.Join(answers, " + ") + ")"
		// Without any answer the panel says "No data", although everything is known.
		for _, expr := range []string{all + " <= bool " + fmt.Sprint(readable), all + " >= bool 1"} {
			text, err := json.Marshal(chosen.Replace(expr))
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&file, "  - {expr: %s, eval_time: 9m, exp_samples: [{labels: '{}', value: 1}]}\n", text)
		}
	}
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	if err := os.WriteFile(path, []byte(file.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "promtool", "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%.6000s", err, out)
	}
}
