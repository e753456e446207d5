// Package kubernetes tests deploy/kubernetes and deploy/helm without a cluster. It builds them
// with kustomize and Helm, decodes them as the API server does, and checks the promises of the
// documents.
package kubernetes

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/distribution/reference"
	"github.com/google/go-cmp/cmp"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"
)

const (
	deploy     = "../../deploy/kubernetes/"
	base       = deploy + "base"
	prometheus = deploy + "overlays/prometheus-operator"
	sidecar    = "testdata/kube-proxy"
	everything = "testdata/everything"
	uninstall  = "testdata/uninstall"
)

// TestEveryFolderIsTried: each kustomization of deploy/kubernetes is part of one that these
// tests build.
func TestEveryFolderIsTried(t *testing.T) {
	var found []string
	for _, pattern := range []string{"*", "*/*"} {
		files, err := filepath.Glob(deploy + pattern + "/kustomization.yaml")
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			found = append(found, strings.TrimPrefix(filepath.Dir(file), filepath.Clean(deploy)+"/"))
		}
	}
	want := []string{"base", "sidecar", "components/culprits", "components/host-pid", "components/lib-modules", "components/selinux", "components/uninstall", "overlays/prometheus-operator"}
	if diff := cmp.Diff(want, found); diff != "" {
		t.Errorf("kustomizations (-tried +there):\n%s", diff)
	}
}

// TestLeastRights: canaryd's container has these rights, in each combination.
func TestLeastRights(t *testing.T) {
	two := []core.Capability{"NET_ADMIN", "NET_RAW"}
	for _, c := range []struct {
		dir     string
		add     []core.Capability
		hostPID bool
		selinux string
	}{
		{dir: base, add: two},
		{dir: prometheus, add: two},
		{dir: sidecar, add: two},
		{dir: uninstall, add: two},
		{dir: "testdata/host-pid", add: two, hostPID: true},
		{dir: everything, add: append(two, "SYS_ADMIN"), hostPID: true, selinux: "spc_t"},
	} {
		t.Run(filepath.Base(c.dir), func(t *testing.T) {
			pod := build(t, c.dir).pod(t)
			container := canaryd(t, pod)
			rights := container.SecurityContext
			// It may be in the pod or in the container.
			if rights.SeccompProfile == nil {
				rights.SeccompProfile = pod.SecurityContext.SeccompProfile
			}
			yes, no, root := true, false, int64(0)
			want := &core.SecurityContext{
				RunAsUser: &root, RunAsGroup: &root,
				AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
				Capabilities:   &core.Capabilities{Drop: []core.Capability{"ALL"}, Add: c.add},
				SeccompProfile: &core.SeccompProfile{Type: core.SeccompProfileTypeRuntimeDefault},
			}
			if c.selinux != "" {
				want.SELinuxOptions = &core.SELinuxOptions{Type: c.selinux}
			}
			if diff := cmp.Diff(want, rights); diff != "" {
				t.Errorf("the security context (-want +got):\n%s", diff)
			}
			if !pod.HostNetwork || pod.HostIPC || pod.HostPID != c.hostPID {
				t.Errorf("network, processes, memory of the host: %t, %t, %t", pod.HostNetwork, pod.HostPID, pod.HostIPC)
			}
		})
	}
}

// TestPod: the pod has all that it needs to guard a node.
func TestPod(t *testing.T) {
	made := build(t, base)
	pod := made.pod(t)
	if account := made["ServiceAccount"].(*core.ServiceAccount); pod.ServiceAccountName != account.Name ||
		account.AutomountServiceAccountToken == nil || *account.AutomountServiceAccountToken ||
		pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("the pod has a token for the API server, which it never asks")
	}
	if pod.PriorityClassName != "system-node-critical" {
		t.Errorf("the priority class is %q", pod.PriorityClassName)
	}
	if diff := cmp.Diff([]core.Toleration{{Operator: core.TolerationOpExists}}, pod.Tolerations); diff != "" {
		t.Errorf("tolerations of every taint (-want +got):\n%s", diff)
	}
	// The same time as systemd's unit allows for a replay under way.
	unit, err := os.ReadFile("../../deploy/systemd/canaryd.service")
	if err != nil {
		t.Fatal(err)
	}
	if pod.TerminationGracePeriodSeconds == nil || *pod.TerminationGracePeriodSeconds != 30 || !bytes.Contains(unit, []byte("\nTimeoutStopSec=30s\n")) {
		t.Error("the pod is not given the time to end that the unit gives")
	}
	strategy := made["DaemonSet"].(*apps.DaemonSet).Spec.UpdateStrategy
	if strategy.Type != apps.RollingUpdateDaemonSetStrategyType || strategy.RollingUpdate.MaxSurge.IntValue() != 0 {
		t.Error("an update would start a second canaryd next to the first")
	}
	limits := canaryd(t, pod).Resources
	if _, limited := limits.Limits[core.ResourceCPU]; limited {
		t.Error("a limit of CPU makes replays longer")
	}
	if limits.Limits.Memory().Cmp(*limits.Requests.Memory()) <= 0 || limits.Requests.Cpu().IsZero() {
		t.Error("no memory for a replay, or no CPU asked for")
	}
}

// TestMounts: the container sees only the necessary parts of the host, and not its /run with
// the container runtime's socket.
func TestMounts(t *testing.T) {
	file, folder := core.HostPathFileOrCreate, core.HostPathDirectoryOrCreate
	host := func(path string, kind *core.HostPathType) core.VolumeSource {
		return core.VolumeSource{HostPath: &core.HostPathVolumeSource{Path: path, Type: kind}}
	}
	type mounted struct {
		Source   core.VolumeSource
		ReadOnly bool
	}
	for _, dir := range []string{base, prometheus, sidecar, everything, uninstall} {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			pod := build(t, dir).pod(t)
			volumes := map[string]core.VolumeSource{}
			for _, v := range pod.Volumes {
				volumes[v.Name] = v.VolumeSource
			}
			if len(volumes) != len(pod.Volumes) {
				t.Error("two volumes have one name")
			}
			got := map[string]mounted{}
			for _, m := range canaryd(t, pod).VolumeMounts {
				source, there := volumes[m.Name]
				if !there {
					t.Errorf("there is no volume %s", m.Name)
				}
				if source.EmptyDir != nil { // its size does not matter
					source.EmptyDir.SizeLimit = nil
				}
				got[m.MountPath] = mounted{source, m.ReadOnly}
			}
			want := map[string]mounted{
				"/run/xtables.lock":    {Source: host("/run/xtables.lock", &file)},
				"/var/lib/canaryd":     {Source: host("/var/lib/canaryd", &folder)},
				"/run/canaryd":         {Source: host("/run/canaryd", &folder)},
				"/var/lib/cni/results": {Source: host("/var/lib/cni/results", &folder), ReadOnly: true},
				"/tmp":                 {Source: core.VolumeSource{EmptyDir: &core.EmptyDirVolumeSource{Medium: core.StorageMediumMemory}}},
			}
			if dir == everything { // the only one with components/lib-modules
				want["/lib/modules"] = mounted{Source: host("/lib/modules", nil), ReadOnly: true}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
		})
	}
}

// TestProbes: every probe uses the control socket, where other users' processes cannot delay
// it, and none depends on the TCP port. For each probe the runtime starts a program, so there
// are at most three a minute while the pod runs.
func TestProbes(t *testing.T) {
	for _, c := range []struct {
		dir   string
		ready bool
		args  []string
	}{
		{dir: base, ready: true, args: []string{"run"}},
		// A flush does not make kube-proxy unready.
		{dir: sidecar, args: []string{"run"}},
		{dir: prometheus, ready: true, args: []string{"run", "--metrics-bind-address=[$(HOST_IP)]:9475"}},
	} {
		t.Run(filepath.Base(c.dir), func(t *testing.T) {
			container := canaryd(t, build(t, c.dir).pod(t))
			if diff := cmp.Diff(c.args, container.Args); diff != "" {
				t.Errorf("arguments (-want +got):\n%s", diff)
			}
			want := map[string][]string{"startup": {"canaryd", "health"}, "liveness": {"canaryd", "health"}}
			if c.ready {
				want["readiness"] = []string{"canaryd", "health", "ready"}
			}
			got, everyHour := map[string][]string{}, 0
			for name, probe := range map[string]*core.Probe{"startup": container.StartupProbe, "liveness": container.LivenessProbe, "readiness": container.ReadinessProbe} {
				switch {
				case probe == nil:
				case probe.Exec == nil:
					t.Errorf("the %s probe executes nothing: %v", name, probe)
				default:
					got[name] = probe.Exec.Command
					if name != "startup" {
						everyHour += 3600 / int(probe.PeriodSeconds)
					}
				}
			}
			if everyHour > 3*60 {
				t.Errorf("the probes execute %d programs an hour, want at most %d", everyHour, 3*60)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("what the probes execute (-want +got):\n%s", diff)
			}
			// Kubernetes substitutes only declared variables.
			for _, e := range container.Env {
				if e.Name != "HOST_IP" || e.ValueFrom.FieldRef.FieldPath != "status.hostIP" {
					t.Errorf("an unexpected variable: %v", e)
				}
			}
			if strings.Contains(strings.Join(container.Args, " "), "$(HOST_IP)") != (len(container.Env) == 1) {
				t.Error("HOST_IP is used and not declared, or declared and not used")
			}
		})
	}
}

// TestArguments: the built canaryd takes each container's command line.
func TestArguments(t *testing.T) {
	program := built(t)
	for _, dir := range []string{base, sidecar, everything, uninstall} {
		args := append(canaryd(t, build(t, dir).pod(t)).Args, "--help")
		if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
			t.Errorf("canaryd %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
}

// TestUninstall: the pods of components/uninstall remove the marks and stay. They are ready
// once no mark is left. No probe needs a daemon, because none runs.
func TestUninstall(t *testing.T) {
	made := build(t, uninstall)
	container := canaryd(t, made.pod(t))
	if container.StartupProbe != nil || container.LivenessProbe != nil {
		t.Error("a probe would restart the pod because no daemon answers")
	}
	if len(container.Ports) > 0 {
		t.Errorf("the PodMonitor scrapes ports %v, which nothing serves: CanarydDownOnManyNodes pages", container.Ports)
	}
	if rule := build(t, "testdata/uninstall-alerts")["PrometheusRule"].(*monitoring.PrometheusRule); len(rule.Spec.Groups) > 0 {
		t.Errorf("without targets CanarydAbsent pages: %d groups of alerts are left", len(rule.Spec.Groups))
	}
	got := map[string][]string{"args": container.Args, "readiness": container.ReadinessProbe.Exec.Command}
	want := map[string][]string{"args": {"cleanup", "--stay"}, "readiness": {"canaryd", "cleanup"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the pod executes (-want +got):\n%s", diff)
	}
	// All nodes at the same time, and never two canaryds on a node.
	update := made["DaemonSet"].(*apps.DaemonSet).Spec.UpdateStrategy.RollingUpdate
	if update.MaxUnavailable.String() != "100%" || update.MaxSurge.IntValue() != 0 {
		t.Errorf("the update has %s unavailable, %s more", update.MaxUnavailable, update.MaxSurge)
	}
}

// TestSidecar: kube-proxy's own container does not change. The patch is the base's container,
// except for differences that the base's comments explain.
func TestSidecar(t *testing.T) {
	text, err := os.ReadFile(sidecar + "/kube-proxy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var before apps.DaemonSet
	if err := yaml.UnmarshalStrict(text, &before); err != nil {
		t.Fatal(err)
	}
	after := build(t, sidecar).pod(t)
	container := canaryd(t, after)
	after.Containers = slices.DeleteFunc(after.Containers, func(c core.Container) bool { return c.Name == "canaryd" })
	after.Volumes = slices.DeleteFunc(after.Volumes, func(v core.Volume) bool { return strings.HasPrefix(v.Name, "canaryd-") })
	byName := func(a, b core.Volume) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(before.Spec.Template.Spec.Volumes, byName)
	slices.SortFunc(after.Volumes, byName)
	if diff := cmp.Diff(before.Spec.Template.Spec, after); diff != "" {
		t.Errorf("kube-proxy's pod without canaryd (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(canaryd(t, build(t, base).pod(t)).Resources, container.Resources); diff != "" {
		t.Errorf("resources (-base +sidecar):\n%s", diff)
	}
}

// TestSidecarComesSecond: kubectl logs and kubectl exec use the first container of a pod. That
// is kube-proxy's, however the patch is applied.
func TestSidecarComesSecond(t *testing.T) {
	want := []string{"kube-proxy", "canaryd"}
	if diff := cmp.Diff(want, names(build(t, sidecar).pod(t))); diff != "" {
		t.Errorf("built by kustomize (-want +got):\n%s", diff)
	}
	inJSON := func(path string) []byte {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if text, err = yaml.YAMLToJSONStrict(text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	// As the API server applies kubectl patch, once and again.
	patched, patch := inJSON(sidecar+"/kube-proxy.yaml"), inJSON(deploy+"sidecar/canaryd.yaml")
	for range 2 {
		var err error
		if patched, err = strategicpatch.StrategicMergePatch(patched, patch, apps.DaemonSet{}); err != nil {
			t.Fatal(err)
		}
		var after apps.DaemonSet
		if err := yaml.UnmarshalStrict(patched, &after); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, names(after.Spec.Template.Spec)); diff != "" {
			t.Errorf("patched by the API server (-want +got):\n%s", diff)
		}
	}
}

func names(pod core.PodSpec) (names []string) {
	for _, c := range pod.Containers {
		names = append(names, c.Name)
	}
	return names
}

// unnamed is the image without an operator's name for it.
const unnamed = "canaryd/NAME-YOUR-OWN-IMAGE"

// TestImage: the same image is everywhere, and an operator changes its name everywhere at once.
// kubelet refuses the unchanged name at once, because an image's path has no capitals.
func TestImage(t *testing.T) {
	for dir, want := range map[string]string{base: unnamed, sidecar: unnamed, everything: "registry.example/of-ours/canaryd:v1.2.3"} {
		if got := canaryd(t, build(t, dir).pod(t)).Image; got != want {
			t.Errorf("%s: the image is %s, want %s", dir, got, want)
		}
	}
	if _, err := reference.ParseNormalizedNamed(unnamed); err == nil || !strings.Contains(err.Error(), unnamed+") must be lowercase") {
		t.Errorf("kubelet says to %s: %v", unnamed, err)
	}
	readme, err := os.ReadFile(deploy + "README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(readme, []byte("- name: "+unnamed+"\n")) {
		t.Errorf("the README does not say how to replace %s", unnamed)
	}
}

// TestKustomizationsOfTheDocuments: each names folders of a checkout, which exist before any
// release. It makes a pod of the image that it names.
func TestKustomizationsOfTheDocuments(t *testing.T) {
	found := 0
	for _, file := range []string{"../../docs/install.md", deploy + "README.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// In a fence, or indented by four columns.
		for _, of := range regexp.MustCompile("(?m)^(    )?resources: \\[(?:[^`\n].*\n)+").FindAllStringSubmatch(string(text), -1) {
			kustomization := strings.ReplaceAll("\n"+of[0], "\n"+of[1], "\n")
			found++
			all := build(t, kustomizationOf(t, kustomization))
			if image := canaryd(t, all.pod(t)).Image; !strings.HasPrefix(image, "YOUR-REGISTRY/canaryd:") {
				t.Errorf("%s makes pods of %s", file, image)
			}
		}
	}
	if found != 2 {
		t.Errorf("the documents show %d kustomizations", found)
	}
}

// TestNoDocumentNeedsARelease: no document has an address of a release, because there is none
// yet.
func TestNoDocumentNeedsARelease(t *testing.T) {
	for _, pattern := range []string{"../../docs/*.md", "../../deploy/*.md", "../../deploy/*/*.md", "../../deploy/*/*.yaml", "../../*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, address := range regexp.MustCompile(`https://github\.com/\S+(?:\?ref=|/releases/|/v\d)\S*|\bexample\.(?:org|com)\b`).FindAllString(string(text), -1) {
				t.Errorf("%s names %s", file, address)
			}
		}
	}
}

// TestNodeProblemDetector: the ConfigMap has all files that node-problem-detector needs in a
// pod, at the paths that these files use.
func TestNodeProblemDetector(t *testing.T) {
	config, ok := build(t, deploy+"../node-problem-detector")["ConfigMap"].(*core.ConfigMap)
	if !ok {
		t.Fatal("there is no ConfigMap")
	}
	readme, err := os.ReadFile(deploy + "../node-problem-detector/README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(readme, []byte("name: "+config.Name)) {
		t.Errorf("the README does not mount %s", config.Name)
	}
	for file := range config.Data {
		if path := "/canaryd/" + file; !bytes.Contains(readme, []byte(path)) && !strings.Contains(config.Data["canaryd-daemonset.json"], path) {
			t.Errorf("nothing names %s", path)
		}
	}
	mounts := canaryd(t, build(t, base).pod(t)).VolumeMounts
	if journal := config.Data["canaryd-daemonset-flushes.json"]; !strings.Contains(journal, `"/var/lib/canaryd/journal.jsonl"`) ||
		!slices.ContainsFunc(mounts, func(m core.VolumeMount) bool { return m.MountPath == "/var/lib/canaryd" }) {
		t.Error("flush records are not where the DaemonSet keeps them")
	}
}
