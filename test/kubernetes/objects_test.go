package kubernetes

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// Objects are the objects of a kustomization or of the chart, by kind.
type objects map[string]any

// types returns the published types of all expected objects.
func types() map[string]any {
	return map[string]any{
		"v1 Namespace": &core.Namespace{},
		"v1 Service":   &core.Service{},
		"monitoring.coreos.com/v1 ServiceMonitor": &monitoring.ServiceMonitor{},
		"v1 ConfigMap":                            &core.ConfigMap{},
		"v1 ServiceAccount":                       &core.ServiceAccount{},
		"apps/v1 DaemonSet":                       &apps.DaemonSet{},
		"monitoring.coreos.com/v1 PodMonitor":     &monitoring.PodMonitor{},
		"monitoring.coreos.com/v1 PrometheusRule": &monitoring.PrometheusRule{},
	}
}

// build builds a kustomization and decodes its objects. A field that a type does not have fails
// the test.
func build(t *testing.T, dir string) objects {
	t.Helper()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatalf("kustomize build %s: %v", dir, err)
	}
	all := objects{}
	for _, resource := range made.Resources() {
		text, err := resource.AsYAML()
		if err != nil {
			t.Fatal(err)
		}
		all.add(t, dir, text)
	}
	return all
}

// add decodes an object from a folder. A field that its type does not have fails the test.
func (o objects) add(t *testing.T, dir string, text []byte) {
	t.Helper()
	var head meta.PartialObjectMetadata
	if err := yaml.Unmarshal(text, &head); err != nil {
		t.Fatalf("%s: %v\n%s", dir, err, text)
	}
	kind := head.APIVersion + " " + head.Kind
	object := types()[kind]
	if object == nil {
		t.Fatalf("%s makes a %s, which is not expected", dir, kind)
	}
	if err := yaml.UnmarshalStrict(text, object); err != nil {
		t.Fatalf("%s, %s: %v", dir, kind, err)
	}
	if head.Namespace != "kube-system" && head.Kind != "Namespace" {
		t.Errorf("%s, %s: the namespace is %q", dir, kind, head.Namespace)
	}
	if _, twice := o[head.Kind]; twice {
		t.Errorf("%s makes two objects of the kind %s", dir, kind)
	}
	o[head.Kind] = object
}

func (o objects) pod(t *testing.T) core.PodSpec {
	t.Helper()
	set, ok := o["DaemonSet"].(*apps.DaemonSet)
	if !ok {
		t.Fatal("there is no DaemonSet")
	}
	for key, value := range set.Spec.Selector.MatchLabels {
		if set.Spec.Template.Labels[key] != value {
			t.Errorf("the DaemonSet selects %s=%s, its pods have %q", key, value, set.Spec.Template.Labels[key])
		}
	}
	return set.Spec.Template.Spec
}

// canaryd returns the container of that name.
func canaryd(t *testing.T, pod core.PodSpec) core.Container {
	t.Helper()
	i := slices.IndexFunc(pod.Containers, func(c core.Container) bool { return c.Name == "canaryd" })
	if i < 0 {
		t.Fatal("no container is called canaryd")
	}
	return pod.Containers[i]
}

// built builds a canaryd from these sources and returns its path.
func built(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "canaryd")
	if out, err := exec.Command("go", "build", "-C", "../..", "-o", program, "./cmd/canaryd").CombinedOutput(); err != nil {
		t.Fatalf("building canaryd: %v\n%s", err, out)
	}
	return program
}
