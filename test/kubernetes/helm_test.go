package kubernetes

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const chart = "../../deploy/helm/canaryd"

// template renders the chart with values, written as YAML, as "helm template canaryd" does.
func template(t *testing.T, values string) (objects, error) {
	t.Helper()
	return release(t, "canaryd", values)
}

// release renders a release of that name.
func release(t *testing.T, name, values string) (objects, error) {
	t.Helper()
	loaded, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	options := common.ReleaseOptions{Name: name, Namespace: "kube-system", IsInstall: true}
	all, err := util.ToRenderValues(loaded, parsed(t, values), options, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.RenderWithContext(t.Context(), loaded, all)
	if err != nil {
		return nil, err
	}
	made := objects{}
	for path, text := range files {
		if strings.TrimSpace(text) != "" && filepath.Ext(path) == ".yaml" {
			made.add(t, path, []byte(text))
		}
	}
	return made, nil
}

func parsed(t *testing.T, values string) map[string]any {
	t.Helper()
	var given map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &given); err != nil {
		t.Fatal(err)
	}
	return given
}

func helm(t *testing.T, values string) objects {
	t.Helper()
	made, err := template(t, values)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// TestChartIsWhatKustomizeMakes: the chart's values make the same objects as the components and
// overlays of deploy/kubernetes.
func TestChartIsWhatKustomizeMakes(t *testing.T) {
	const image = `{"image": {"repository": "registry.example/of-ours/canaryd", "tag": "v1.2.3"}`
	for _, c := range []struct{ values, dir string }{
		{image + `}`, base},
		{image + `, "hostPID": true}`, "testdata/host-pid"},
		{image + `, "uninstall": true}`, uninstall},
		{image + `, "podMonitor": {"enabled": true}, "prometheusRule": {"enabled": true}}`, prometheus},
		{image + `, "uninstall": true, "podMonitor": {"enabled": true}, "prometheusRule": {"enabled": true}}`, "testdata/uninstall-alerts"},
		{image + `, "culprits": true, "libModules": true, "selinux": true, "podMonitor": {"enabled": true}, "prometheusRule": {"enabled": true}}`, everything},
	} {
		t.Run(filepath.Base(c.dir), func(t *testing.T) {
			want, got := build(t, c.dir), helm(t, c.values)
			pod := want.pod(t)
			for i := range pod.Containers {
				if pod.Containers[i].Image == unnamed {
					pod.Containers[i].Image = "registry.example/of-ours/canaryd:v1.2.3"
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-kustomize +Helm:\n%s", diff)
			}
		})
	}
}

// TestChartValues: some values exist only in the chart, and the built canaryd takes their
// arguments.
func TestChartValues(t *testing.T) {
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	made := helm(t, `
image: {repository: registry.example/canaryd, tag: v9, digest: "`+digest+`"}
mode: observe
protect: [kube, "MY-*", "rule:nat:PREROUTING:AWS, *"]
extraArgs: [--settle=50ms]
resources: {limits: {memory: 1Gi}}
podMonitor: {enabled: true, labels: {release: prometheus}}
prometheusRule: {enabled: true, labels: {release: prometheus}}
dashboard: {enabled: true}
`)
	container := canaryd(t, made.pod(t))
	if want := "registry.example/canaryd@" + digest; container.Image != want {
		t.Errorf("the image is %s, want %s: the digest says which", container.Image, want)
	}
	args := []string{"run", "--metrics-bind-address=[$(HOST_IP)]:9475", "--mode=observe", `--protect=kube,MY-*,"rule:nat:PREROUTING:AWS, *"`, "--settle=50ms"}
	if diff := cmp.Diff(args, container.Args); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	if out, err := exec.Command(built(t), append(args, "--help")...).CombinedOutput(); err != nil {
		t.Errorf("canaryd %s: %v: %s", strings.Join(args, " "), err, out)
	}
	// Helm merges values, so other values keep their defaults.
	if memory := container.Resources.Limits.Memory().String(); memory != "1Gi" || container.Resources.Requests.Cpu().IsZero() {
		t.Errorf("resources are %v", container.Resources)
	}
	for _, kind := range []string{"PodMonitor", "PrometheusRule"} {
		if labels := labelsOf(t, made[kind]); labels["release"] != "prometheus" || labels["app.kubernetes.io/name"] != "canaryd" {
			t.Errorf("the %s has labels %v", kind, labels)
		}
	}
	dashboard, err := os.ReadFile("../../deploy/grafana/canaryd.json")
	if err != nil {
		t.Fatal(err)
	}
	config, ok := made["ConfigMap"].(*core.ConfigMap)
	if !ok || config.Labels["grafana_dashboard"] != "1" {
		t.Fatalf("Grafana's sidecar finds no dashboard: %v", made["ConfigMap"])
	}
	if diff := cmp.Diff(strings.TrimSpace(string(dashboard)), strings.TrimSpace(config.Data["canaryd.json"])); diff != "" {
		t.Errorf("the dashboard (-deploy/grafana +chart):\n%s", diff)
	}
}

func labelsOf(t *testing.T, object any) map[string]string {
	t.Helper()
	labelled, ok := object.(interface{ GetLabels() map[string]string })
	if !ok {
		t.Fatalf("%T has no labels", object)
	}
	return labelled.GetLabels()
}

// TestChartRefuses: Helm refuses a wrong value, and the message names it.
func TestChartRefuses(t *testing.T) {
	const image = `image: {repository: registry.example/canaryd, tag: v1}`
	for values, want := range map[string]string{
		`{}`: "image.repository is empty",
		`image: {repository: registry.example/canaryd}`:                      "image.tag and image.digest are empty",
		`image: {repository: registry.example/canaryd, digest: "sha256:12"}`: "digest",
		image + "\nalerts: {enabled: true}":                                  "alerts", // until 0.1.0
		image + "\nhostPid: true":                                            "hostPid",
		image + "\nmode: repair":                                             "mode",
		image + "\nprotect: kube":                                            "protect",
		image + "\nextraArgs: [observe]":                                     "extraArgs",
		image + "\nprometheusRule: {enabled: true, groups: [canaries]}":      `there is no group "canaries", only canaryd-pages, canaryd-tickets, canaryd-features`,
		image + "\nextraEnv: [{name: HOST_IP, value: x}]":                    "/extraEnv/0/name",
		image + "\nupdateStrategy: {maxUnavailable: 0}":                      "maxUnavailable",
		image + "\nprometheusRule: {enable: yes}":                            "enable",
	} {
		if _, err := template(t, values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with the values\n%s\nHelm says %v, want %q", values, err, want)
		}
	}
}

// TestReleasedManifests: an operator names only a registry by newName, as docs/fleet.md says.
// The digest that a release has appended to the image's name stays.
func TestReleasedManifests(t *testing.T) {
	const digest = "@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	dir := t.TempDir()
	files := map[string]string{"kustomization.yaml": "resources: [base]\nimages: [{name: " + unnamed + ", newName: registry.example/canaryd}]\n"}
	for _, name := range []string{"kustomization.yaml", "serviceaccount.yaml", "daemonset.yaml"} {
		text, err := os.ReadFile(base + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		files["base/"+name] = strings.ReplaceAll(string(text), "image: "+unnamed+"\n", "image: "+unnamed+digest+"\n")
	}
	if err := os.Mkdir(dir+"/base", 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got := canaryd(t, build(t, dir).pod(t)).Image; got != "registry.example/canaryd"+digest {
		t.Errorf("the image is %s", got)
	}
}
