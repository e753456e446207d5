//go:build cluster

package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
)

const (
	imageName = "registry.example/canaryd"
	// place of the image's name in the manifests.
	noImage = "canaryd/NAME-YOUR-OWN-IMAGE"
)

// deploy returns a path in this node's copy of deploy/kubernetes.
func (n *node) deploy(path ...string) string {
	return filepath.Join(append([]string{filepath.Dir(n.dir), "deploy"}, path...)...)
}

// kustomization writes a kustomization of the operator's own, and returns its folder. Resources and
// components are folders of deploy/kubernetes, or files in the new folder.
func (n *node) kustomization(name, tag string, resources, components []string) string {
	n.Helper()
	dir := n.deploy("own", string(n.backend), name)
	n.must(os.MkdirAll(dir, 0o755))
	var text strings.Builder
	text.WriteString("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n")
	for _, list := range []struct {
		what  string
		paths []string
	}{{"resources", resources}, {"components", components}} {
		if len(list.paths) > 0 {
			text.WriteString(list.what + ":\n")
		}
		for _, path := range list.paths {
			if _, err := os.Stat(filepath.Join(dir, path)); err != nil {
				path = "../../../" + path
			}
			text.WriteString("  - " + path + "\n")
		}
	}
	fmt.Fprintf(&text, "images:\n  - name: %s\n    newName: %s\n    newTag: %s\n", noImage, imageName, tag)
	n.must(os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text.String()), 0o600))
	return dir
}

// components returns the components of deploy/kubernetes, except for some.
func (n *node) components(without ...string) []string {
	n.Helper()
	entries, err := os.ReadDir(n.deploy("components"))
	n.must(err)
	var all []string
	for _, e := range entries {
		if !slices.Contains(without, e.Name()) {
			all = append(all, "components/"+e.Name())
		}
	}
	return all
}

// tryManifests has the API server take each base, component and overlay, strictly, and over
// each other. There is no node yet, so no pod begins.
func tryManifests(n *node) {
	n.wantDefinitions()
	const overlay = "overlays/prometheus-operator"
	sets := map[string]string{"base": n.kustomization("base", "v1", []string{"base"}, nil)}
	for _, c := range n.components() {
		sets["base with "+c] = n.kustomization(filepath.Base(c), "v1", []string{"base"}, []string{c})
	}
	sets[overlay] = n.kustomization("overlay", "v1", []string{overlay}, nil)
	sets["everything"] = n.kustomization("everything", "v1", []string{overlay}, n.components("uninstall"))
	for _, name := range slices.Sorted(maps.Keys(sets)) {
		n.applied(name, sets[name], "--dry-run=server")
		n.applied(name, sets[name])
	}
	n.applied("base", sets["base"])
	n.wantLikeNew(sets["base"])
	n.want("kubectl", "delete", "-k", sets["everything"])
	n.trySidecar()
	n.results.accepted = len(sets) + 1
}

// applied applies a kustomization, and fails the test at a warning.
func (n *node) applied(name, dir string, flags ...string) {
	n.Helper()
	args := append([]string{"apply", "--server-side", "--validate=strict", "-k", dir}, flags...)
	out, warnings, err := n.run("", "kubectl", args...)
	n.must(err)
	if warnings != "" {
		n.Errorf("of %s the API server says: %s", name, warnings)
	}
	if !strings.Contains(out, "daemonset.apps/") {
		n.Errorf("%s has no DaemonSet:\n%s", name, out)
	}
}

// wantDefinitions applies those of Prometheus Operator, which the overlay needs.
func (n *node) wantDefinitions() {
	n.Helper()
	for _, kind := range []string{"podmonitors", "prometheusrules"} {
		n.want("kubectl", "apply", "--server-side", "-f", filepath.Join(filepath.Dir(n.dir), "definitions", "monitoring.coreos.com_"+kind+".yaml"))
		n.want("kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/"+kind+".monitoring.coreos.com")
	}
}

// wantLikeNew wants the DaemonSet to have no field left of the manifests before it.
func (n *node) wantLikeNew(dir string) {
	n.Helper()
	const spec = "-o=jsonpath={.spec}"
	before := n.want("kubectl", "-n", "kube-system", "get", "daemonset", "canaryd", spec)
	n.want("kubectl", "delete", "-k", dir)
	n.applied("base", dir)
	after := n.want("kubectl", "-n", "kube-system", "get", "daemonset", "canaryd", spec)
	if diff := cmp.Diff(after, before); diff != "" {
		n.Errorf("the DaemonSet, applied over others (-new +over others):\n%s", diff)
	}
}

// trySidecar adds canaryd to kube-proxy's DaemonSet in both ways of the document.
func (n *node) trySidecar() {
	n.Helper()
	proxy, err := os.ReadFile("../kubernetes/testdata/kube-proxy/kube-proxy.yaml")
	n.must(err)
	n.must(os.MkdirAll(n.deploy("own", string(n.backend), "sidecar"), 0o755))
	n.must(os.WriteFile(n.deploy("own", string(n.backend), "sidecar", "kube-proxy.yaml"), proxy, 0o600))
	dir := n.kustomization("sidecar", "v1", []string{"kube-proxy.yaml"}, []string{"sidecar"})
	n.applied("sidecar", dir, "--dry-run=server")
	n.applied("sidecar", dir)
	built := n.proxyPod()
	n.want("kubectl", "-n", "kube-system", "delete", "daemonset", "kube-proxy")

	patch, err := os.ReadFile(n.deploy("sidecar", "canaryd.yaml"))
	n.must(err)
	file := n.file("sidecar.yaml", strings.ReplaceAll(string(patch), noImage, imageName+":v1"))
	n.want("kubectl", "apply", "--server-side", "--validate=strict", "-f", n.deploy("own", string(n.backend), "sidecar", "kube-proxy.yaml"))
	for i := range 2 {
		out := n.want("kubectl", "-n", "kube-system", "patch", "daemonset", "kube-proxy", "--type=strategic", "--patch-file", file)
		if i == 1 && !strings.Contains(out, "no change") {
			n.Errorf("patched again, the DaemonSet changes: %s", out)
		}
	}
	if diff := cmp.Diff(built, n.proxyPod()); diff != "" {
		n.Errorf("the DaemonSet kube-proxy (-by kustomize +by kubectl patch):\n%s", diff)
	}
	n.want("kubectl", "-n", "kube-system", "delete", "daemonset", "kube-proxy")
	n.until("the DaemonSets to be gone", func() error {
		out, _, err := n.run("", "kubectl", "-n", "kube-system", "get", "daemonsets", "-o=name")
		if err == nil && out != "" {
			err = fmt.Errorf("there are %s", out)
		}
		return err
	})
}

// proxyPod returns the pod of kube-proxy's DaemonSet. The order of volumes does not matter.
func (n *node) proxyPod() (pod map[string]any) {
	n.Helper()
	text := n.want("kubectl", "-n", "kube-system", "get", "daemonset", "kube-proxy", "-o=jsonpath={.spec.template.spec}")
	n.must(json.Unmarshal([]byte(text), &pod))
	volumes, ok := pod["volumes"].([]any)
	if !ok {
		n.Fatalf("the pod of kube-proxy has no volumes: %s", text)
	}
	slices.SortFunc(volumes, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return pod
}
