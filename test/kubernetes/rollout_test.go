package kubernetes

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const rollout = "../../docs/fleet.md"

var block = regexp.MustCompile("(?s)```yaml\n# ([a-z.]+)\n(.*?)```")

// TestRollout follows docs/fleet.md, once with the chart and once with kustomize. A step is an
// edit of the document's files. Both make the same objects in each step, and each step makes
// only its own changes.
func TestRollout(t *testing.T) {
	text, err := os.ReadFile(rollout)
	if err != nil {
		t.Fatal(err)
	}
	blocks := map[string]string{}
	for _, found := range block.FindAllStringSubmatch(string(text), -1) {
		blocks[found[1]] = found[2]
	}
	values, kustomization := blocks["values.yaml"], blocks["kustomization.yaml"]
	const set = "DaemonSet.spec.template.spec."
	var before map[string]string
	for _, step := range []struct {
		name   string
		edit   func()
		expect []string // the changed paths
	}{
		{name: "observe", edit: func() {}},
		{"heal", func() {
			values = without(t, values, "mode: observe")
			kustomization = withoutPatch(t, kustomization, "--mode=observe")
		}, []string{set + "containers[0].args[2]"}},
		{"drills", func() {
			values += blocks["drills.values"]
			kustomization += blocks["drills.patch"]
		}, []string{set + "containers[0].args[2]"}},
		{"all nodes", func() {
			values = without(t, values, "nodeSelector:")
			kustomization = withoutPatch(t, kustomization, "nodeSelector/canaryd")
		}, []string{set + "nodeSelector.canaryd"}},
		{"upgrade", func() {
			values, kustomization = strings.ReplaceAll(values, "0.1.0", "0.2.0"), strings.ReplaceAll(kustomization, "0.1.0", "0.2.0")
		}, []string{set + "containers[0].image"}},
		{"uninstall", func() {
			values += "uninstall: true\n"
			kustomization = withoutPatch(t, kustomization, "--drill-every") + blocks["uninstall"]
		}, []string{
			set + "containers[0].args[0]", set + "containers[0].args[1]", set + "containers[0].args[2]", set + "containers[0].livenessProbe", set + "containers[0].ports",
			set + "containers[0].readinessProbe.exec.command[1]", set + "containers[0].readinessProbe.exec.command[2]",
			set + "containers[0].readinessProbe.failureThreshold", set + "containers[0].readinessProbe.periodSeconds", set + "containers[0].readinessProbe.timeoutSeconds",
			set + "containers[0].startupProbe", "DaemonSet.spec.updateStrategy.rollingUpdate.maxUnavailable", "PrometheusRule.spec.groups",
		}},
	} {
		step.edit()
		chart, kustomize := helm(t, values), build(t, kustomizationOf(t, kustomization))
		if diff := cmp.Diff(kustomize, chart); diff != "" {
			t.Errorf("%s (-kustomize +Helm):\n%s", step.name, diff)
		}
		now := flat(t, chart)
		if before == nil {
			pod := chart.pod(t)
			if args := canaryd(t, pod).Args; args[len(args)-1] != "--mode=observe" || pod.NodeSelector["canaryd"] != "on" {
				t.Errorf("the first step runs canaryd %q on %v", args, pod.NodeSelector)
			}
		} else if diff := cmp.Diff(step.expect, changed(before, now)); diff != "" {
			t.Errorf("%s changes (-want +got):\n%s", step.name, diff)
		}
		before = now
	}
}

// without returns the text without the one line that has the word.
func without(t *testing.T, text, word string) string {
	t.Helper()
	lines := strings.SplitAfter(text, "\n")
	kept := slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return strings.Contains(line, word) })
	if len(kept) != len(lines)-1 {
		t.Fatalf("%d lines have %q in\n%s", len(lines)-len(kept), word, text)
	}
	return strings.Join(kept, "")
}

// withoutPatch returns the kustomization without the one patch that has the word, and without the
// list of patches if it was the last one.
func withoutPatch(t *testing.T, text, word string) string {
	t.Helper()
	head, patches, _ := strings.Cut(text, "patches:\n")
	var kept []string
	found := 0
	for _, patch := range strings.Split(patches, "  - target:")[1:] {
		if strings.Contains(patch, word) {
			found++
			continue
		}
		kept = append(kept, "  - target:"+patch)
	}
	if found != 1 {
		t.Fatalf("%d patches have %q in\n%s", found, word, text)
	}
	if len(kept) == 0 {
		return head
	}
	return head + "patches:\n" + strings.Join(kept, "")
}

// kustomizationOf writes the kustomization to a folder, with the path to this checkout.
func kustomizationOf(t *testing.T, text string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(dir, root)
	if err != nil {
		t.Fatal(err)
	}
	text = strings.ReplaceAll(text, "[deploy/", "["+up+"/deploy/")
	if err := os.WriteFile(dir+"/kustomization.yaml", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// flat returns each value of the objects by its path. An added or removed probe or list of
// ports is one change, as changed counts it.
func flat(t *testing.T, o objects) map[string]string {
	t.Helper()
	all := map[string]string{}
	var walk func(path string, value any)
	walk = func(path string, value any) {
		switch value := value.(type) {
		case map[string]any:
			all[path] = "object"
			for key, inner := range value {
				walk(path+"."+key, inner)
			}
		case []any:
			all[path] = "list"
			for i, inner := range value {
				walk(fmt.Sprintf("%s[%d]", path, i), inner)
			}
		default:
			all[path] = fmt.Sprint(value)
		}
	}
	for kind, object := range o {
		text, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		var tree any
		if err := json.Unmarshal(text, &tree); err != nil {
			t.Fatal(err)
		}
		walk(kind, tree)
	}
	return all
}

// changed returns the paths with different values, without the paths inside an added or removed
// object.
func changed(before, now map[string]string) []string {
	paths := map[string]bool{}
	for path, value := range before {
		if now[path] != value {
			paths[path] = true
		}
	}
	for path := range now {
		if _, there := before[path]; !there {
			paths[path] = true
		}
	}
	all := slices.Sorted(maps.Keys(paths))
	return slices.DeleteFunc(all, func(path string) bool {
		return slices.ContainsFunc(all, func(outer string) bool {
			return strings.HasPrefix(path, outer+".") || strings.HasPrefix(path, outer+"[")
		})
	})
}
