package packaging

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// These environment variables have the pod that this process must become, and say that it is
// already in the pod's namespaces.
const (
	podVariable   = "CANARYD_TEST_POD"
	stageVariable = "CANARYD_TEST_POD_INSIDE"
)

// A pod is a container runtime's input: one container on the host's network.
type pod struct {
	Image   string // folder of its root file system
	Host    string // folder that replaces the host's root, except for /run
	Command []string
	Env     []string
	Spec    podSpec
}

// A daemonSet is the part of a DaemonSet that a runtime uses. test/kubernetes decodes all of it
// strictly, with Kubernetes' types.
type daemonSet struct {
	Spec struct {
		Template struct {
			Spec podSpec `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
}

type podSpec struct {
	HostNetwork bool        `json:"hostNetwork"`
	HostPID     bool        `json:"hostPID"`
	Containers  []container `json:"containers"`
	Volumes     []volume    `json:"volumes"`
}

type container struct {
	Image           string   `json:"image"`
	Args            []string `json:"args"`
	StartupProbe    *probe   `json:"startupProbe"`
	LivenessProbe   *probe   `json:"livenessProbe"`
	ReadinessProbe  *probe   `json:"readinessProbe"`
	SecurityContext struct {
		RunAsUser                *int64 `json:"runAsUser"`
		ReadOnlyRootFilesystem   *bool  `json:"readOnlyRootFilesystem"`
		AllowPrivilegeEscalation *bool  `json:"allowPrivilegeEscalation"`
		Capabilities             struct {
			Add  []string `json:"add"`
			Drop []string `json:"drop"`
		} `json:"capabilities"`
	} `json:"securityContext"`
	VolumeMounts []struct {
		Name      string `json:"name"`
		MountPath string `json:"mountPath"`
		ReadOnly  bool   `json:"readOnly"`
	} `json:"volumeMounts"`
}

type probe struct {
	Exec struct {
		Command []string `json:"command"`
	} `json:"exec"`
}

type volume struct {
	Name     string `json:"name"`
	HostPath *struct {
		Path string `json:"path"`
		Type string `json:"type"`
	} `json:"hostPath"`
}

// capabilityNumbers are the numbers of linux/capability.h.
var capabilityNumbers = map[string]int{"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW, "SYS_ADMIN": unix.CAP_SYS_ADMIN}

// become makes this process the variable's pod and returns its exit code.
func become(text string) int {
	err := func() error {
		var p pod
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			return err
		}
		if os.Getenv(stageVariable) == "" {
			return p.supervise()
		}
		return p.enter()
	}()
	if exit, ok := err.(*exec.ExitError); ok {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pod:", err)
		return 1
	}
	return 0
}

// supervise starts this program again in namespaces of the pod's own, and passes SIGTERM on.
func (p pod) supervise() error {
	runtime.LockOSThread() // Pdeathsig depends on the thread
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), stageVariable+"=yes")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if !p.Spec.HostPID {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWPID
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() {
		<-stop
		_ = cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
	}()
	return cmd.Wait()
}

// enter mounts the pod's volumes, makes that the root, gives up all rights that the container
// does not have, and executes the image's program.
func (p pod) enter() error {
	runtime.LockOSThread() // capabilities are a thread's, and exec keeps the calling thread's
	root, err := p.mounts()
	if err != nil {
		return err
	}
	if err := pivot(root); err != nil {
		return err
	}
	if err := p.confine(); err != nil {
		return err
	}
	// The kernel forgets the signal for a parent's death when a process gives up rights.
	// Without the signal a canaryd whose supervisor is killed would outlive the test.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("asking to end with the supervisor: %w", err)
	}
	return &os.PathError{Op: "exec", Path: p.Command[0], Err: unix.Exec(p.Command[0], p.Command, p.Env)}
}

// mounts returns the root: the image below a layer for the mount points, as container runtimes
// do it, which is then read-only.
func (p pod) mounts() (root string, err error) {
	dir, err := os.MkdirTemp("/run", "pod-")
	if err != nil {
		return "", err
	}
	root = filepath.Join(dir, "root")
	var steps error
	do := func(source, target, kind string, flags uintptr, data string) {
		if steps == nil {
			if err := unix.Mount(source, target, kind, flags, data); err != nil {
				steps = fmt.Errorf("mounting %s (%s): %w", target, kind, err)
			}
		}
	}
	folder := func(path string) string {
		if steps == nil {
			steps = os.MkdirAll(path, 0o755)
		}
		return path
	}
	file := func(path string) string {
		folder(filepath.Dir(path))
		f, err := os.OpenFile(path, os.O_CREATE, 0o600)
		if steps == nil {
			steps = err
		}
		f.Close()
		return path
	}
	do("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	do("overlay", folder(root), "overlay", unix.MS_NODEV, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", p.Image, folder(dir+"/upper"), folder(dir+"/work")))
	do("proc", root+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	do("sysfs", root+"/sys", "sysfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	do("tmpfs", root+"/dev", "tmpfs", unix.MS_NOSUID, "mode=0755")
	for _, device := range []string{"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"} {
		do(device, file(root+device), "", unix.MS_BIND, "")
	}
	container := p.Spec.Containers[0]
	for _, m := range container.VolumeMounts {
		i := slices.IndexFunc(p.Spec.Volumes, func(v volume) bool { return v.Name == m.Name })
		if i < 0 {
			return "", fmt.Errorf("there is no volume %s", m.Name)
		}
		target, host := root+m.MountPath, p.Spec.Volumes[i].HostPath
		if host == nil {
			do("tmpfs", folder(target), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0777")
			continue
		}
		source := host.Path
		if !strings.HasPrefix(source, "/run/") {
			source = p.Host + source
		}
		if host.Type == "FileOrCreate" {
			do(file(source), file(target), "", unix.MS_BIND, "")
		} else {
			do(folder(source), folder(target), "", unix.MS_BIND, "")
		}
		if m.ReadOnly {
			do("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
		}
	}
	if *container.SecurityContext.ReadOnlyRootFilesystem {
		do("", root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NODEV, "")
	}
	return root, steps
}

func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leaving the old root: %w", err)
	}
	return os.Chdir("/")
}

func (p pod) confine() error {
	rights := p.Spec.Containers[0].SecurityContext
	if len(rights.Capabilities.Drop) != 1 || rights.Capabilities.Drop[0] != "ALL" || *rights.RunAsUser != 0 {
		return fmt.Errorf("this runtime drops all capabilities and runs as root, the pod wants %v as %d", rights.Capabilities.Drop, *rights.RunAsUser)
	}
	var kept uint64
	for _, c := range rights.Capabilities.Add {
		number, known := capabilityNumbers[c]
		if !known {
			return fmt.Errorf("unknown capability %s", c)
		}
		kept |= 1 << number
	}
	for c := 0; ; c++ {
		if kept&(1<<c) != 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err == unix.EINVAL {
			break // the kernel has no more capabilities
		} else if err != nil {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(kept), Permitted: uint32(kept)},
		{Effective: uint32(kept >> 32), Permitted: uint32(kept >> 32)},
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	if *rights.AllowPrivilegeEscalation {
		return nil
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}
