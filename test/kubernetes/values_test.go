package kubernetes

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// examples returns the chart's files of values, by name.
func examples(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob(chart + "/ci/*-values.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no values in %s/ci: %v", chart, err)
	}
	all := map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(file), "-values.yaml")] = string(text)
	}
	return all
}

// TestChartLint: Helm's own linter accepts the chart, without values and with each of its
// examples. Each example makes objects.
func TestChartLint(t *testing.T) {
	all := examples(t)
	all["none"] = ""
	for name, values := range all {
		for _, message := range lint.RunAll(chart, parsed(t, values), "kube-system").Messages {
			if message.Severity > support.InfoSev { // it suggests an icon
				t.Errorf("%s: %v", name, message)
			}
		}
		if name != "none" {
			helm(t, values)
		}
	}
}

// free are the values whose keys an operator chooses.
var free = []string{"labels", "podLabels", "podAnnotations", "nodeSelector", "affinity.nodeAffinity", "resources.requests", "resources.limits",
	"podMonitor.labels", "serviceMonitor.labels", "prometheusRule.labels", "dashboard.labels"}

// TestEachValueCounts: each value of values.yaml has another value in
// ci/everything-values.yaml, and changes an object. Helm refuses a misspelled key at any place.
func TestEachValueCounts(t *testing.T) {
	text, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defaults, given := parsed(t, string(text)), parsed(t, examples(t)["everything"])
	rendered := func() objects {
		t.Helper()
		text, err := yaml.Marshal(given)
		if err != nil {
			t.Fatal(err)
		}
		return helm(t, string(text))
	}
	all := rendered()
	refused := func(path string) {
		t.Helper()
		text, err := yaml.Marshal(given)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := template(t, string(text)); err == nil || !strings.Contains(err.Error(), "misspelled") {
			t.Errorf("%s: a misspelled key is accepted: %v", path, err)
		}
	}
	// Another value hides these, and they have tests of their own.
	hidden := []string{"image.repository", "image.tag", "hostPID", "uninstall", "updateStrategy.type", "prometheusRule.groups"}
	var walk func(path string, defaults, given map[string]any)
	walk = func(path string, defaults, given map[string]any) {
		if !slices.Contains(free, strings.TrimSuffix(path, ".")) {
			given["misspelled"] = "x"
			refused(path)
			delete(given, "misspelled")
		}
		for _, key := range slices.Sorted(maps.Keys(defaults)) {
			at, was := path+key, given[key]
			if slices.Contains(hidden, at) {
				continue
			}
			if was == nil {
				t.Errorf("ci/everything-values.yaml has no %s", at)
				continue
			}
			inner, nested := defaults[key].(map[string]any)
			if nested && len(inner) > 0 && !slices.Contains(free, at) {
				walk(at+".", inner, was.(map[string]any))
				continue
			}
			given[key] = defaults[key]
			if reflect.DeepEqual(all, rendered()) {
				t.Errorf("%s changes nothing", at)
			}
			given[key] = was
		}
	}
	walk("", defaults, given)
}

// TestMonitors: PodMonitor and ServiceMonitor find the pods by the same labels, and give their
// series the same labels.
func TestMonitors(t *testing.T) {
	made := helm(t, examples(t)["everything"])
	set, service := made["DaemonSet"].(*apps.DaemonSet), made["Service"].(*core.Service)
	if diff := cmp.Diff(set.Spec.Selector.MatchLabels, service.Spec.Selector); diff != "" {
		t.Errorf("the Service selects other pods (-pods +selected):\n%s", diff)
	}
	if service.Spec.ClusterIP != core.ClusterIPNone {
		t.Errorf("the Service has the address %q, and rules of kube-proxy on each node", service.Spec.ClusterIP)
	}
	container := canaryd(t, made.pod(t))
	if port := service.Spec.Ports[0].TargetPort.String(); port != container.Ports[0].Name {
		t.Errorf("the Service leads to the port %s, the pod's is %s", port, container.Ports[0].Name)
	}
	for _, only := range []string{"podMonitor", "serviceMonitor"} {
		args := canaryd(t, helm(t, "image: {repository: registry.example/canaryd, tag: v1}\n"+only+": {enabled: true}").pod(t)).Args
		if !slices.Contains(args, "--metrics-bind-address=[$(HOST_IP)]:9475") {
			t.Errorf("with the %s canaryd listens on loopback: %q", only, args)
		}
	}
	namespace := made["Namespace"].(*core.Namespace).Labels
	if namespace["pod-security.kubernetes.io/enforce"] != "privileged" {
		t.Errorf("the namespace has labels %v, and Pod Security may refuse the pods", namespace)
	}
}

// TestUpdateStrategy: OnDelete leaves each node to the operator, except for the removal of the
// marks.
func TestUpdateStrategy(t *testing.T) {
	const values = "image: {repository: registry.example/canaryd, tag: v1}\nupdateStrategy: {type: OnDelete}\n"
	if strategy := helm(t, values)["DaemonSet"].(*apps.DaemonSet).Spec.UpdateStrategy; strategy.Type != apps.OnDeleteDaemonSetStrategyType || strategy.RollingUpdate != nil {
		t.Errorf("the strategy is %v", strategy)
	}
	if strategy := helm(t, values+"uninstall: true")["DaemonSet"].(*apps.DaemonSet).Spec.UpdateStrategy; strategy.RollingUpdate == nil || strategy.RollingUpdate.MaxUnavailable.String() != "100%" {
		t.Errorf("the marks are removed with the strategy %v", strategy)
	}
}

// TestSelectorStays: the API server refuses another selector for an existing DaemonSet. All
// builds so far have this one, in the kustomization and in the release canaryd, with any labels
// of an operator. Prometheus also finds the pods of an earlier build.
func TestSelectorStays(t *testing.T) {
	const values = "image: {repository: registry.example/canaryd, tag: v1}\npodMonitor: {enabled: true}\n"
	want := meta.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/name": "canaryd"}}
	for name, made := range map[string]objects{
		"kustomize": build(t, prometheus),
		"chart":     helm(t, values),
		"labels":    helm(t, values+"labels: {app.kubernetes.io/name: mine}\npodLabels: {app.kubernetes.io/name: theirs}\n"),
	} {
		set, monitor := made["DaemonSet"].(*apps.DaemonSet), made["PodMonitor"].(*monitoring.PodMonitor)
		if diff := cmp.Diff(&want, set.Spec.Selector); diff != "" {
			t.Errorf("%s: an upgrade of the DaemonSet is refused (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(want, monitor.Spec.Selector); diff != "" {
			t.Errorf("%s: the PodMonitor (-want +got):\n%s", name, diff)
		}
		if !selects(t, set, set) {
			t.Errorf("%s: the DaemonSet selects others than its pods, which have %v", name, set.Spec.Template.Labels)
		}
	}
}

// selects reports whether one DaemonSet's selector matches the pods of another.
func selects(t *testing.T, one, other *apps.DaemonSet) bool {
	t.Helper()
	selector, err := meta.LabelSelectorAsSelector(one.Spec.Selector)
	if err != nil {
		t.Fatal(err)
	}
	return selector.Matches(labels.Set(other.Spec.Template.Labels))
}

// TestReleaseNames: objects have the release's name, and it contains canaryd, because alerts
// find the job by that. A label has 63 letters at most.
func TestReleaseNames(t *testing.T) {
	long := strings.Repeat("a", 53)
	for name, want := range map[string]string{
		"canaryd":                  "canaryd",
		"canaryd-observe":          "canaryd-observe",
		"edge":                     "edge-canaryd",
		long:                       long[:44] + "-canaryd",
		long[:46] + "canaryd":      long[:46] + "canaryd",
		long[:43] + "-" + long[:9]: long[:43] + "-canaryd",
	} {
		made, err := release(t, name, examples(t)["everything"])
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range []string{"DaemonSet", "ServiceAccount", "Service", "PodMonitor", "ServiceMonitor"} {
			if got := made[kind].(interface{ GetName() string }).GetName(); got != want {
				t.Errorf("the %s of the release %s is called %s, want %s", kind, name, got, want)
			}
		}
		if set := made["DaemonSet"].(*apps.DaemonSet); !selects(t, set, set) || len(want) > 63 {
			t.Errorf("the release %s selects %v", name, set.Spec.Selector)
		}
	}
}

// TestSideBySide: two releases have no name in common, select only their own pods, and share no
// node. Both have one common label, for commands about all pods.
func TestSideBySide(t *testing.T) {
	all := examples(t)
	render := func(name, values string) objects {
		t.Helper()
		made, err := release(t, name, values+"podMonitor: {enabled: true}\n")
		if err != nil {
			t.Fatal(err)
		}
		return made
	}
	heal, observe := render("canaryd", all["side-by-side-heal"]), render("canaryd-observe", all["side-by-side-observe"])
	for kind := range heal {
		name := func(o objects) string { return o[kind].(interface{ GetName() string }).GetName() }
		if name(heal) != "canaryd" || name(observe) != "canaryd-observe" {
			t.Errorf("the %ss are called %s and %s", kind, name(heal), name(observe))
		}
	}
	sets := []*apps.DaemonSet{heal["DaemonSet"].(*apps.DaemonSet), observe["DaemonSet"].(*apps.DaemonSet)}
	for i, set := range sets {
		other := sets[1-i]
		if !selects(t, set, set) || selects(t, set, other) {
			t.Errorf("%s selects %v; the pods of %s have %v", set.Name, set.Spec.Selector, other.Name, other.Spec.Template.Labels)
		}
		if part := set.Spec.Template.Labels["app.kubernetes.io/part-of"]; part != "canaryd" {
			t.Errorf("the pods of %s are part of %q", set.Name, part)
		}
		if pod := set.Spec.Template.Spec; pod.ServiceAccountName != set.Name {
			t.Errorf("the pods of %s have the account %s", set.Name, pod.ServiceAccountName)
		}
	}
	if got := observe.pod(t).NodeSelector["canaryd"]; got != "observe" {
		t.Errorf("the one that observes selects canaryd=%s", got)
	}
	terms := heal.pod(t).Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	want := []core.NodeSelectorTerm{{MatchExpressions: []core.NodeSelectorRequirement{{Key: "canaryd", Operator: core.NodeSelectorOpNotIn, Values: []string{"observe"}}}}}
	if diff := cmp.Diff(want, terms); diff != "" {
		t.Errorf("the one that heals selects nodes (-want +got):\n%s", diff)
	}
}
