package watch

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	testID  = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	testPod = "8d1f0a52-6c3e-4a8b-9d7e-2f1c0b9a8e7d"
)

func TestPlace(t *testing.T) {
	underscored := strings.ReplaceAll(testPod, "-", "_")
	pod := Container{ID: testID, Pod: testPod}
	for _, tt := range []struct {
		name, cgroup string
		want         Origin
		text         string
	}{
		{"a unit", "0::/system.slice/cron.service\n", Origin{Unit: "cron.service"}, "cron.service"},
		{"a session", "0::/user.slice/user-1000.slice/session-3.scope\n", Origin{Unit: "session-3.scope"}, "session-3.scope"},
		{"PID 1", "0::/init.scope\n", Origin{}, ""},
		{"a pod, by systemd", "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + underscored + ".slice/cri-containerd-" + testID + ".scope\n", Origin{Container: pod}, "container 0123456789ab of pod " + testPod},
		{"a guaranteed pod", "0::/kubepods.slice/kubepods-pod" + underscored + ".slice/crio-" + testID + ".scope\n", Origin{Container: pod}, "container 0123456789ab of pod " + testPod},
		{"a pod, by kubelet", "0::/kubepods/besteffort/pod" + testPod + "/" + testID + "\n", Origin{Container: pod}, "container 0123456789ab of pod " + testPod},
		{"a static pod", "0::/kubepods/burstable/pod" + testID[:32] + "/" + testID + "\n", Origin{Container: Container{ID: testID, Pod: testID[:32]}}, "container 0123456789ab of pod " + testID[:32]},
		{"a pod seen from another one", "0::/../../pod" + testPod + "/" + testID + "\n", Origin{Container: pod}, "container 0123456789ab of pod " + testPod},
		{"Docker, by systemd", "0::/system.slice/docker-" + testID + ".scope\n", Origin{Container: Container{ID: testID}}, "container 0123456789ab"},
		{"cgroup v1", "12:pids:/docker/" + testID + "\n1:name=systemd:/docker/" + testID + "\n0::/\n", Origin{Container: Container{ID: testID}}, "container 0123456789ab"},
		{"cgroup v1 without systemd", "3:cpu,cpuacct:/docker/" + testID + "\n", Origin{Container: Container{ID: testID}}, "container 0123456789ab"},
		{"a pod of containerd without systemd", "0::/system.slice/containerd.service/kubepods-besteffort-pod" + underscored + ".slice:cri-containerd:" + testID + "\n", Origin{Unit: "containerd.service", Container: pod}, "container 0123456789ab of pod " + testPod + " in containerd.service"},
		{"Podman without root", "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + testID + ".scope/container\n", Origin{Unit: "user@1000.service", Container: Container{ID: testID}}, "container 0123456789ab in user@1000.service"},
		{"a machine", "0::/machine.slice/machine-router.scope/payload/system.slice/cron.service\n", Origin{Container: Container{Name: "router"}}, "container router"},
		{"LXC", "0::/lxc.payload.router/system.slice\n", Origin{Container: Container{Name: "router"}}, "container router"},
		{"old LXC", "4:devices:/lxc/router\n", Origin{Container: Container{Name: "router"}}, "container router"},
		{"what runs beside a container", "0::/machine.slice/libpod-conmon-" + testID + ".scope\n", Origin{Unit: "libpod-conmon-" + testID[:50]}, "libpod-conmon-" + testID[:50]},
		{"a name within a unit is no evidence", "0::/system.slice/cron.service/docker-x.scope/sshd.service\n", Origin{Unit: "cron.service"}, "cron.service"},
		{"nor is one within a container", "0::/docker/" + testID + "/system.slice/sshd.service/" + strings.Repeat("f", 64) + "\n", Origin{Container: Container{ID: testID}}, "container 0123456789ab"},
		{"hostile bytes", "0::/system.slice/a\x1b[2J\u202e\xff.service\n", Origin{Unit: `a\x1b[2J\xe2\x80\xae\xff.service`}, `a\x1b[2J\xe2\x80\xae\xff.service`},
		{"hostile length", "0::/" + strings.Repeat("a", 5000) + ".service\n", Origin{Unit: strings.Repeat("a", maxName)}, strings.Repeat("a", maxName)},
		{"no cgroup of its own", "0::/\n", Origin{}, ""},
		{"nothing", "", Origin{}, ""},
		{"no lines of a cgroup file", "::\n:\nx\n", Origin{}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := placeOf(tt.cgroup)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got.String() != tt.text {
				t.Errorf("in words it is %q, want %q", got, tt.text)
			}
		})
	}
}

// addProcess adds a process to a /proc.
func addProcess(t *testing.T, proc string, pid int, comm string, parent int, start uint64) {
	t.Helper()
	dir := filepath.Join(proc, fmt.Sprint(pid))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	stat := fmt.Sprintf("%d (%s) S %d 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 %d 1000 1\n", pid, comm, parent, start)
	if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestAncestors(t *testing.T) {
	proc := fakeProc(t, 50, "nft", "nft\x00flush\x00ruleset\x00")
	addProcess(t, proc, 50, "nft", 40, 900)
	addProcess(t, proc, 40, ") S 1 (", 30, 900) // a name may look like the fields after it
	addProcess(t, proc, 30, "cr\non", 20, 500)
	addProcess(t, proc, 20, "systemd", 10, 100)
	addProcess(t, proc, 10, "too far", 1, 50)
	if err := os.WriteFile(filepath.Join(proc, "50", "cgroup"), []byte("0::/system.slice/cron.service\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	command, o := processOf(proc, 50, "nft")
	want := Origin{Ancestors: []string{") S 1 (", `cr\x0aon`, "systemd"}, Unit: "cron.service"}
	if diff := cmp.Diff(want, o); diff != "" || command != "nft flush ruleset" {
		t.Errorf("%q (-want +got):\n%s", command, diff)
	}
	if _, o := processOf(proc, 50, "iptables"); !cmp.Equal(o, Origin{}) {
		t.Errorf("the number is another process's, and its origin is %+v", o)
	}

	addProcess(t, proc, 30, "young", 20, 901) // the parent's number was used again
	if _, o := processOf(proc, 50, "nft"); !cmp.Equal(o.Ancestors, []string{") S 1 ("}) {
		t.Errorf("with a parent that is younger than its child: %q", o.Ancestors)
	}
	addProcess(t, proc, 50, "nft", 1, 900)
	if _, o := processOf(proc, 50, "nft"); o.Ancestors != nil {
		t.Errorf("of an orphan: %q", o.Ancestors)
	}
}

// TestOriginOfAChild reads the kernel's own files.
func TestOriginOfAChild(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sleep 60; :")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	self := readProcess(procFolder, uint32(os.Getpid())).comm
	eventually(t, func() bool {
		p := readProcess(procFolder, uint32(cmd.Process.Pid))
		return p.comm == "sh" && len(p.origin.Ancestors) > 0 && p.origin.Ancestors[0] == self
	})
}

func FuzzOrigin(f *testing.F) {
	f.Add("0::/system.slice/cron.service\n")
	f.Add("0::/kubepods/besteffort/pod" + testPod + "/" + testID + "\n1:name=systemd:/lxc/")
	f.Fuzz(func(t *testing.T, text string) {
		o := placeOf(text)
		for _, s := range []string{o.Unit, o.Container.Name, o.Container.Pod, o.Container.ID} {
			if len(s) > maxName || strings.ContainsAny(s, "\n\x1b") {
				t.Errorf("%q", s)
			}
		}
		_ = o.String()
	})
}

func BenchmarkOrigin(b *testing.B) {
	for b.Loop() {
		readProcess(procFolder, uint32(os.Getpid()))
	}
}
