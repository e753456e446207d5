package alerts

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const (
	rulesFile   = "../../deploy/prometheus/canaryd.rules.yaml"
	unitTests   = "../../deploy/prometheus/canaryd.rules.test.yaml"
	runbookFile = "../../docs/troubleshoot.md"
	runbookURL  = "https://github.com/canaryd/canaryd/blob/main/docs/troubleshoot.md#"
)

func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil { // the tests wait for the next scrape
		panic(err)
	}
	os.Exit(nodetest.Main(m))
}

// An alert is one alerting rule.
type alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func decode(t *testing.T, path string, into any) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(read(t, path)), into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// A group is a set of alerts that are used together.
type group struct {
	Name  string  `json:"name"`
	Rules []alert `json:"rules"`
}

func groups(t *testing.T) []group {
	t.Helper()
	var file struct {
		Groups []group `json:"groups"`
	}
	decode(t, rulesFile, &file)
	return file.Groups
}

func alerts(t *testing.T) []alert {
	t.Helper()
	var all []alert
	for _, group := range groups(t) {
		all = append(all, group.Rules...)
	}
	if len(all) == 0 {
		t.Fatalf("%s has no rules", rulesFile)
	}
	return all
}

// promtool runs promtool, and fails the test if promtool finds an error.
func promtool(t *testing.T, input string, args ...string) {
	t.Helper()
	nstest.NeedProgram(t, "promtool")
	cmd := exec.CommandContext(t.Context(), "promtool", args...)
	cmd.Stdin = strings.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestRules: Prometheus takes the rules, and they pass their unit tests.
func TestRules(t *testing.T) {
	t.Parallel()
	promtool(t, "", "check", "rules", rulesFile)
	promtool(t, "", "test", "rules", unitTests)
}

// TestGroups: one group has exactly the alerts that page. Each group alone passes the unit
// tests of its alerts.
func TestGroups(t *testing.T) {
	t.Parallel()
	var names []string
	for _, g := range groups(t) {
		names = append(names, g.Name)
		in := map[string]bool{}
		for _, a := range g.Rules {
			in[a.Alert] = true
			if pages := a.Labels["severity"] == "critical"; pages != (g.Name == "canaryd-pages") {
				t.Errorf("%s is %s, in the group %s", a.Alert, a.Labels["severity"], g.Name)
			}
			if others := regexp.MustCompile(`ALERTS|:`).FindString(strings.ReplaceAll(a.Expr, "[1h:1m]", "")); others != "" {
				t.Errorf("%s goes by another rule: %s", a.Alert, a.Expr)
			}
		}
		t.Run(g.Name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			write := func(name string, content any) {
				text, err := yaml.Marshal(content)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			var tests map[string]any
			decode(t, unitTests, &tests)
			for _, one := range tests["tests"].([]any) {
				test := one.(map[string]any)
				if list, ok := test["alert_rule_test"].([]any); ok {
					test["alert_rule_test"] = slices.DeleteFunc(list, func(a any) bool { return !in[a.(map[string]any)["alertname"].(string)] })
				}
				delete(test, "promql_expr_test") // it is about all groups together
			}
			write("canaryd.rules.yaml", map[string]any{"groups": []group{g}})
			write("test.yaml", tests)
			promtool(t, "", "test", "rules", filepath.Join(dir, "test.yaml"))
		})
	}
	if diff := cmp.Diff([]string{"canaryd-pages", "canaryd-tickets", "canaryd-features"}, names); diff != "" {
		t.Errorf("groups (-want +got):\n%s", diff)
	}
}

// compared returns the metrics that alerts compare with their past. A series of them that began
// with 1 would have no increase.
func compared(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, a := range alerts(t) {
		for _, found := range regexp.MustCompile(`(?:increase|rate|delta|changes)\((canaryd_[a-z_]+)(\{[^}]*\})?\[`).FindAllStringSubmatch(a.Expr, -1) {
			names[found[1]] = true
			for _, label := range regexp.MustCompile(`result="(\w+)"`).FindAllStringSubmatch(found[2], -1) {
				names[found[1]+" "+label[1]] = true
			}
		}
	}
	return names
}

// TestFirstIncrementsAreSeen: series that an alert compares with their past exist from the
// start.
func TestFirstIncrementsAreSeen(t *testing.T) {
	t.Parallel()
	start := read(t, "../../internal/metrics/testdata/metrics_start.txt")
	names := compared(t)
	if len(names) < 8 {
		t.Errorf("the alerts compare only %v", names)
	}
	for name := range names {
		metric, result, labelled := strings.Cut(name, " ")
		pattern := `(?m)^` + metric + `[{ ]`
		if labelled {
			pattern = `(?m)^` + metric + `\{.*result="` + result + `"`
		}
		if !regexp.MustCompile(pattern).MatchString(start) {
			t.Errorf("%s is not there from the start: the first increment would raise no alert", name)
		}
	}
}

// TestEveryAlertIsTried: in the unit tests each alert fires at least once, and once it does
// not.
func TestEveryAlertIsTried(t *testing.T) {
	t.Parallel()
	type expected struct {
		Alertname string `json:"alertname"`
		ExpAlerts []any  `json:"exp_alerts"`
	}
	var file struct {
		Tests []struct {
			Alerts []expected `json:"alert_rule_test"`
		} `json:"tests"`
	}
	if err := yaml.Unmarshal([]byte(read(t, unitTests)), &file); err != nil {
		t.Fatal(err)
	}
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		for _, e := range test.Alerts {
			if len(e.ExpAlerts) > 0 {
				fires[e.Alertname] = true
			} else {
				quiet[e.Alertname] = true
			}
		}
	}
	for _, a := range alerts(t) {
		if !fires[a.Alert] || !quiet[a.Alert] {
			t.Errorf("%s is seen to fire: %t, to be quiet: %t", a.Alert, fires[a.Alert], quiet[a.Alert])
		}
	}
}

// TestAlertsSayWhatToDo: each alert has a severity, a summary, a description and a section under
// "By alert" of docs/troubleshoot.md that answers four questions. The sections are in the order of
// the alerts, and no other section is among them.
func TestAlertsSayWhatToDo(t *testing.T) {
	t.Parallel()
	_, part, found := strings.Cut(read(t, runbookFile), "\n## By alert\n")
	part, _, ended := strings.Cut(part, "\n## ")
	if !found || !ended {
		t.Fatalf("%s has no part By alert", runbookFile)
	}
	var titles []string
	sections := map[string]string{}
	for _, section := range strings.Split(part, "\n### ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		titles = append(titles, title)
		sections[title] = text
	}
	var names []string
	for _, a := range alerts(t) {
		names = append(names, a.Alert)
		if !regexp.MustCompile(`^Canaryd[A-Z][A-Za-z]+$`).MatchString(a.Alert) {
			t.Errorf("%s is no name for an alert of canaryd", a.Alert)
		}
		if !slices.Contains([]string{"info", "warning", "critical"}, a.Labels["severity"]) {
			t.Errorf("%s has severity %q", a.Alert, a.Labels["severity"])
		}
		for _, key := range []string{"summary", "description"} {
			if len(a.Annotations[key]) < 20 {
				t.Errorf("%s says too little: %s is %q", a.Alert, key, a.Annotations[key])
			}
		}
		if want := runbookURL + strings.ToLower(a.Alert); a.Annotations["runbook_url"] != want {
			t.Errorf("%s has runbook_url %q, want %q", a.Alert, a.Annotations["runbook_url"], want)
		}
		for _, question := range []string{"**Meaning:**", "**Check:**", "**Do:**", "**False alarm:**"} {
			if !strings.Contains(sections[a.Alert], question) {
				t.Errorf("the runbook's section on %s lacks %s", a.Alert, question)
			}
		}
	}
	if diff := cmp.Diff(names, titles); diff != "" {
		t.Errorf("the runbook's sections are not the alerts (-alerts +sections):\n%s", diff)
	}
}

// TestRunbookNames: the commands, flags and messages that the runbook names exist.
func TestRunbookNames(t *testing.T) {
	t.Parallel()
	runbook := read(t, runbookFile)
	help := ""
	for _, c := range regexp.MustCompile("(?m)(?:`|^    )canaryd ([a-z]+)").FindAllStringSubmatch(runbook, -1) {
		out, err := exec.Command(nodetest.Canaryd(), c[1], "--help").Output()
		if err != nil {
			t.Errorf("the runbook names canaryd %s: %v", c[1], err)
		}
		help += string(out)
	}
	// The help of run omits rare flags; the manual has them.
	manual, err := exec.Command(nodetest.Canaryd(), "man").Output()
	if err != nil {
		t.Fatal(err)
	}
	help += strings.ReplaceAll(string(manual), `\-`, "-")
	others := []string{"--cleanup", "--display", "--iptables-min-sync-period", "--all"} // of other programs
	for _, flag := range regexp.MustCompile("--[a-z][a-z-]+").FindAllString(runbook, -1) {
		if !regexp.MustCompile(regexp.QuoteMeta(flag)+`[ \n]`).MatchString(help) && !slices.Contains(others, flag) {
			t.Errorf("the runbook names %s, which no command has", flag)
		}
	}
	sources := ""
	files, err := filepath.Glob("../../internal/*/*.go") // the loop and its subjects
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		sources += read(t, file)
	}
	for _, message := range regexp.MustCompile(`"([A-Z][^"\n]{12,})"`).FindAllStringSubmatch(runbook, -1) {
		if !strings.Contains(sources, message[1]) {
			t.Errorf("the runbook quotes a log line that is now another: %q", message[1])
		}
	}
	known := exported(t)
	for _, name := range regexp.MustCompile("`(canaryd_[a-z_]+)`").FindAllStringSubmatch(runbook, -1) {
		if !known[name[1]] {
			t.Errorf("the runbook names %s, which is not exported", name[1])
		}
	}
}

// exported returns the names of canaryd's metrics: from its start on, after a flush, or once it
// guards native tables.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	known := map[string]bool{}
	for _, line := range strings.Split(read(t, "../../internal/metrics/testdata/metrics_flush.txt")+read(t, "../../internal/metrics/testdata/metrics_native.txt"), "\n") {
		if name := regexp.MustCompile(`^(?:# TYPE )?(canaryd_[a-z_]+)`).FindStringSubmatch(line); name != nil {
			known[name[1]] = true
		}
	}
	return known
}

// TestRulesNameWhatIsExported: each metric of an alert exists. Otherwise the alert would never
// fire.
func TestRulesNameWhatIsExported(t *testing.T) {
	t.Parallel()
	known := exported(t)
	named := map[string]bool{}
	for _, a := range alerts(t) {
		for _, name := range regexp.MustCompile(`canaryd_[a-z_]+`).FindAllString(a.Expr, -1) {
			named[name] = true
			if !known[name] {
				t.Errorf("%s asks for %s, which is not exported", a.Alert, name)
			}
		}
	}
	if len(named) < 10 {
		t.Errorf("the alerts name only %d metrics", len(named))
	}
}

// TestExposition: Prometheus' linter accepts the exported metrics.
func TestExposition(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"metrics_start.txt", "metrics_flush.txt"} {
		promtool(t, read(t, "../../internal/metrics/testdata/"+name), "check", "metrics")
	}
}
