package kubernetes

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the PrometheusRule again")

const (
	rulesFile = "../../deploy/prometheus/canaryd.rules.yaml"
	ruleFile  = prometheus + "/prometheusrule.yaml"
	heading   = `# Made of deploy/prometheus/canaryd.rules.yaml by "make prometheusrule"; change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: canaryd
  labels:
    app.kubernetes.io/name: canaryd
    app.kubernetes.io/part-of: canaryd
spec:
`
)

// TestPrometheusRule: it has exactly the alerts of the rules file, which Prometheus itself has
// checked.
func TestPrometheusRule(t *testing.T) {
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(heading)
	_, groups, found := strings.Cut(string(text), "\ngroups:\n")
	if !found {
		t.Fatalf("%s has no groups", rulesFile)
	}
	for line := range strings.Lines("groups:\n" + groups) {
		if line != "\n" {
			b.WriteString("  ")
		}
		b.WriteString(line)
	}
	if *update {
		if err := os.WriteFile(ruleFile, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(ruleFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(b.String(), string(got)); diff != "" {
		t.Errorf("the PrometheusRule is not that of the rules file; make prometheusrule writes it again (-want +got):\n%s", diff)
	}

	var want monitoring.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(text, &want); err != nil {
		t.Fatal(err)
	}
	built, ok := build(t, prometheus)["PrometheusRule"].(*monitoring.PrometheusRule)
	if !ok || len(want.Groups) < 3 || len(want.Groups[0].Rules) < 5 {
		t.Fatalf("there is no PrometheusRule, or nothing to compare it with: %d groups", len(want.Groups))
	}
	if diff := cmp.Diff(want, built.Spec); diff != "" {
		t.Errorf("alerts (-rules file +built):\n%s", diff)
	}
}

// TestPodMonitor: it selects canaryd's pods and an existing port. The job of its series is
// canaryd's to the alerts.
func TestPodMonitor(t *testing.T) {
	made := build(t, prometheus)
	monitor, ok := made["PodMonitor"].(*monitoring.PodMonitor)
	if !ok {
		t.Fatal("there is no PodMonitor")
	}
	set := made["DaemonSet"].(*apps.DaemonSet)
	if diff := cmp.Diff(set.Spec.Selector.MatchLabels, monitor.Spec.Selector.MatchLabels); diff != "" || len(monitor.Spec.Selector.MatchExpressions) > 0 {
		t.Errorf("selected pods (-DaemonSet +PodMonitor):\n%s", diff)
	}
	if len(monitor.Spec.PodMetricsEndpoints) != 1 {
		t.Fatalf("there are %d endpoints", len(monitor.Spec.PodMetricsEndpoints))
	}
	endpoint := monitor.Spec.PodMetricsEndpoints[0]
	port := canaryd(t, set.Spec.Template.Spec).Ports[0]
	if endpoint.Port == nil || *endpoint.Port != port.Name || endpoint.Path != "/metrics" {
		t.Errorf("it asks for port %v, %s; the container has %s", endpoint.Port, endpoint.Path, port.Name)
	}
	// The operator names the job NAMESPACE/NAME.
	if job := monitor.Namespace + "/" + monitor.Name; !strings.Contains(job, "canaryd") {
		t.Errorf("alerts do not take the job %s for canaryd's", job)
	}
}
