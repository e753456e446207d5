// Package packaging tests canaryd as it is installed, with deploy's files.
//
// It assembles the image's root file system, and runs canaryd in it as a container runtime
// would for the DaemonSet. So the tests prove without a container engine that the image and the
// pod's rights are enough. The unit runs under a systemd of its own, process 1 of namespaces of
// its own. Packages are built and inspected.
package packaging

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// canaryd is built as for an installation: without the race detector, whose memory the unit's
// sandbox would have to allow.
func TestMain(m *testing.M) {
	if text := os.Getenv(podVariable); text != "" {
		os.Exit(become(text))
	}
	os.Exit(nodetest.Main(m))
}

// guardingPod returns the pod of deploy/kubernetes/base. test/kubernetes compares it with the
// others.
func guardingPod(t *testing.T) podSpec {
	t.Helper()
	var set daemonSet
	if err := yaml.Unmarshal([]byte(source(t, "deploy/kubernetes/base/daemonset.yaml")), &set); err != nil {
		t.Fatal(err)
	}
	if spec := set.Spec.Template.Spec; !spec.HostNetwork || len(spec.Containers) != 1 {
		t.Fatal("the pod is not one container on the host's network")
	}
	return set.Spec.Template.Spec
}

// inPod makes n start its daemons as the container of that pod. The flags of a start have no
// effect there.
func inPod(n *nodetest.Node, spec podSpec) {
	n.Helper()
	inPodOf(n, rootfs(n.T), spec)
}

// inPodOf is inPod with the root file system of an image.
func inPodOf(n *nodetest.Node, image string, spec podSpec) {
	n.Helper()
	nstest.NeedRoot(n.T)
	self, err := os.Executable()
	n.Must(err)
	p := pod{
		Image: image, Host: "/run/host", Spec: spec,
		Command: append(words(n.T, "ENTRYPOINT"), spec.Containers[0].Args...),
		Env:     strings.Fields(instruction(n.T, "ENV")),
	}
	text, err := json.Marshal(p)
	n.Must(err)
	n.Under, n.Env = []string{self}, []string{podVariable + "=" + string(text)}
}

// TestPodHeals: the image runs as the DaemonSet says. canaryd starts, has exactly the stated
// rights, and answers the probes. It restores rules that were flushed while it ran or while it
// did not, and ends on request.
func TestPodHeals(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		spec := guardingPod(n.T)
		inPod(n, spec)
		n.Load()
		before := n.Protected()
		d := n.Start()
		confined(n)
		container := spec.Containers[0]
		for name, probe := range map[string]*probe{"startup": container.StartupProbe, "liveness": container.LivenessProbe, "readiness": container.ReadinessProbe} {
			// On the host, where the socket's folder is.
			if code, stdout, stderr := n.Canaryd(probe.Exec.Command[1], probe.Exec.Command[2:]...); code != 0 || stdout != "ok\n" {
				n.Errorf("the %s probe ends with %d: %s%s", name, code, stdout, stderr)
			}
		}

		n.Flush()
		record := n.Healed(1)
		n.Same("protected rules", before, n.Protected())
		if n.Programs.With == iptables.NFT && record.Culprit.PID == 0 {
			n.Errorf("the kernel said who did it, the record says %+v", record.Culprit)
		}
		for _, f := range n.Status().Flushes {
			if strings.Contains(f.Culprit.Comm, "canaryd") {
				n.Errorf("canaryd is blamed for what others flushed: %+v", f.Culprit)
			}
		}
		// The host's processes are hidden, so their numbers mean other processes here.
		if record.Culprit.Command != "" {
			n.Errorf("a process of another pid namespace is said to have run %q", record.Culprit.Command)
		}

		d.Stop()
		n.Flush()
		d = n.Start()
		n.Until("what was flushed meanwhile", func() error {
			if diff := cmp.Diff(before, n.Protected()); diff != "" {
				return fmt.Errorf("-want +got: %s", diff)
			}
			return nil
		})
		d.Kill()
		n.Until("canaryd to end with its pod", func() error {
			if _, err := nodetest.Fetch("/healthz"); err == nil {
				return errors.New("it answers")
			}
			return nil
		})
	})
}

// TestImageForNFT: an image for nft alone has no iptables. canaryd learns the rules there,
// restores them after a flush, and reports that no iptables is installed.
func TestImageForNFT(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		image := rootfsFor(n.T, "nft")
		n.Must(filepath.WalkDir(image, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && strings.Contains(filepath.Base(path), "tables") {
				n.Errorf("the image has %s", path)
			}
			return err
		}))
		inPodOf(n, image, guardingPod(n.T))
		n.Load()
		before := n.Protected()
		n.Start()
		n.Flush()
		if record := n.Healed(1); record.Outcome != string(reload.Proved) {
			n.Errorf("the record is %+v", record)
		}
		n.Same("protected rules", before, n.Protected())
		text, err := nodetest.Fetch("/api/v1/status")
		n.Must(err)
		var status struct{ Backend api.Backend }
		n.Must(json.Unmarshal([]byte(text), &status))
		if b := status.Backend; b.Name != iptables.NFT || b.Version != "" {
			n.Errorf("the backend is %+v, want nft without a version of iptables", b)
		}
	})
}

// TestPodUninstalls: the pod of components/uninstall replaces the guarding pod. It removes the
// node's marks and nothing else, and stays until it receives a request to end.
func TestPodUninstalls(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		spec := guardingPod(n.T)
		inPod(n, spec)
		n.Load()
		before := n.Protected()
		n.Start().Stop()
		if len(n.Marks()) == 0 {
			n.Fatal("the end of canaryd took its marks")
		}

		spec.Containers[0].Args = uninstallArgs(n.T)
		inPod(n, spec)
		d := n.Launch()
		n.Until("the marks to be removed", func() error {
			if log := d.Log(); !strings.Contains(log, "canaries and witnesses are removed") {
				return errors.New(log)
			}
			return nil
		})
		if marks := n.Marks(); len(marks) != 0 {
			n.Errorf("these marks are left: %q", marks)
		}
		n.Same("protected rules", before, n.Protected())
		// The readiness probe.
		n.Want(0, "cleanup")
		if !d.Running() {
			n.Error("the pod ended, and a DaemonSet would start it again and again")
		}
		d.Stop()
	})
}

// uninstallArgs returns canaryd's arguments from components/uninstall.
func uninstallArgs(t *testing.T) []string {
	t.Helper()
	var component struct {
		Patches []struct{ Patch string }
	}
	if err := yaml.Unmarshal([]byte(source(t, "deploy/kubernetes/components/uninstall/kustomization.yaml")), &component); err != nil {
		t.Fatal(err)
	}
	for _, p := range component.Patches {
		var steps []struct {
			Path  string
			Value any
		}
		if err := yaml.Unmarshal([]byte(p.Patch), &steps); err != nil {
			t.Fatal(err)
		}
		for _, step := range steps {
			if !strings.HasSuffix(step.Path, "/args") {
				continue
			}
			var args []string
			for _, arg := range step.Value.([]any) {
				args = append(args, arg.(string))
			}
			return args
		}
	}
	t.Fatal("components/uninstall sets no arguments")
	return nil
}

// confined fails the test unless the kernel limits canaryd to the DaemonSet's rights.
func confined(n *nodetest.Node) {
	n.Helper()
	dir := canarydProcess(n)
	const netAdminAndRaw = "0000000000003000" // bits 12 and 13, capabilities(7)
	want := map[string]string{
		"NoNewPrivs": "1", "CapBnd": netAdminAndRaw, "CapPrm": netAdminAndRaw, "CapEff": netAdminAndRaw,
		"CapAmb": "0000000000000000", "CapInh": "0000000000000000",
	}
	got := map[string]string{}
	text, err := os.ReadFile(dir + "/status")
	n.Must(err)
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if _, asked := want[name]; asked {
			got[name] = strings.TrimSpace(value)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("/proc/PID/status (-want +got):\n%s", diff)
	}
	writable := map[string]bool{"/run/xtables.lock": true, "/var/lib/canaryd": true, "/run/canaryd": true, "/tmp": true, "/proc": true, "/dev": true}
	text, err = os.ReadFile(dir + "/mounts")
	n.Must(err)
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); strings.HasPrefix(f[3], "rw") && !writable[f[1]] && !strings.HasPrefix(f[1], "/dev/") {
			n.Errorf("%s may be written to", f[1])
		}
	}
	if _, err := os.Stat(dir + "/root/bin/sh"); !errors.Is(err, fs.ErrNotExist) {
		n.Errorf("it has a shell: %v", err)
	}
}

// canarydProcess returns the folder in /proc of this node's canaryd.
func canarydProcess(n *nodetest.Node) string {
	n.Helper()
	ours, err := os.Readlink("/proc/self/ns/net")
	n.Must(err)
	dirs, err := filepath.Glob("/proc/[0-9]*")
	n.Must(err)
	for _, dir := range dirs {
		comm, err := os.ReadFile(dir + "/comm")
		if theirs, linkErr := os.Readlink(dir + "/ns/net"); err == nil && linkErr == nil && string(comm) == "canaryd\n" && theirs == ours {
			return dir
		}
	}
	n.Fatal("no canaryd runs in this network namespace")
	return ""
}

// TestAnotherIsRefused: one canaryd guards a node. A second one is refused, also if the first
// is a pod in its own pid namespace, where its number does not identify it.
func TestAnotherIsRefused(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		inPod(n, guardingPod(n.T))
		n.Load()
		n.Start()
		_, stderr := n.Want(2, "run", "--socket=/run/other.sock", "--metrics-bind-address=")
		if !strings.Contains(stderr, "another canaryd runs in this network namespace") {
			n.Errorf("the second canaryd says %q", stderr)
		}
		second := n.Launch()
		second.End()
		second.WantLog("another canaryd runs in this network namespace")
		n.Flush()
		n.Healed(1)
	})
}

// TestCulprits: canaryd has the host's processes and SYS_ADMIN, as with components/culprits.
// Then records of flushes on legacy name the culprit.
func TestCulprits(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		spec := guardingPod(n.T)
		spec.HostPID = true
		rights := &spec.Containers[0].SecurityContext.Capabilities
		rights.Add = append(rights.Add, "SYS_ADMIN")
		inPod(n, spec)
		n.Load()
		n.Start()
		// A process that ends before canaryd gets a processor leaves only its number, or nothing: 1
		// of 25 flushes next to other tests. Without these rights no flush has a name.
		for flush := 1; ; flush++ {
			n.Flush()
			by := n.Healed(flush).Culprit
			// The kernel keeps 15 bytes of a name.
			if strings.Contains(by.Comm, "tables-legac") && by.PID != 0 {
				return
			}
			if n.Logf("flush %d was done by %+v", flush, by); flush == 3 {
				n.Fatalf("%d flushes were done by %+v", flush, by)
			}
		}
	})
}

// TestAddress: canaryd takes the nodes' address from the Prometheus overlay, for IPv4 and IPv6.
func TestAddress(t *testing.T) {
	patch := source(t, "deploy/kubernetes/overlays/prometheus-operator/address.yaml")
	_, flag, found := strings.Cut(patch, "- --metrics-bind-address=")
	flag, _, _ = strings.Cut(flag, "\n")
	if !found || !strings.Contains(flag, "$(HOST_IP)") {
		t.Fatalf("the overlay's address is %q", flag)
	}
	for _, ip := range []string{"127.0.0.1", "::1"} {
		t.Run(ip, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				n.Load()
				address := strings.ReplaceAll(flag, "$(HOST_IP)", ip)
				n.Launch("--metrics-bind-address=" + address)
				n.Until("an answer at "+address, func() error {
					client := http.Client{Timeout: time.Second}
					response, err := client.Get("http://[" + ip + "]:9475/healthz")
					if ip == "127.0.0.1" {
						response, err = client.Get("http://127.0.0.1:9475/healthz")
					}
					if err != nil {
						return err
					}
					response.Body.Close()
					if response.StatusCode != http.StatusOK {
						return errors.New(response.Status)
					}
					return nil
				})
			})
		})
	}
}
