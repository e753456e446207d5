//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Addresses of the node, of a client next to it, of pods and of services.
const (
	nodeIPv4     = "192.0.2.1"
	nodeIPv6     = "2001:db8::1"
	clientIPv4   = "192.0.2.2"
	clientIPv6   = "2001:db8::2"
	podsIPv4     = "10.244.0.0/24"
	podsIPv6     = "fd00:10:244::/64"
	servicesIPv4 = "10.96.0.0/16"
	servicesIPv6 = "fd00:10:96::/112"
	externalIPv4 = "198.51.100.10"
)

// mount gives the node its own folders where programs write. Their files are deleted with the
// namespace, or with the folder of the test.
func (n *node) mount() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mounting /run: %w", err)
	}
	for _, path := range []string{"/var/lib", "/var/log"} {
		if err := over(filepath.Join(n.dir, path), path); err != nil {
			return err
		}
	}
	// Otherwise kubelet would change the machine's values.
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		path := filepath.Join("/proc/sys", name)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		file := n.file("sysctl/"+strings.ReplaceAll(name, "/", "."), value+"\n")
		if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("hiding %s: %w", path, err)
		}
	}
	// Otherwise the list would begin with the machine's control groups.
	if err := unix.Unmount("/sys", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmounting the machine's /sys: %w", err)
	}
	// This one shows the namespace's interfaces.
	if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /sys: %w", err)
	}
	return mountGroups()
}

// over makes a folder, and mounts it over another.
func over(folder, path string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(folder, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", path, err)
	}
	return nil
}

// mountGroups mounts the control groups, so that the node sees only its own.
func mountGroups() error {
	const root = "/sys/fs/cgroup"
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	if strings.HasPrefix(string(text), "0::") {
		return mountGroup("cgroup2", root, "")
	}
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err != nil {
		return fmt.Errorf("mounting %s: %w", root, err)
	}
	for line := range strings.Lines(string(text)) {
		_, rest, _ := strings.Cut(line, ":")
		controllers, _, _ := strings.Cut(rest, ":")
		if controllers == "" {
			continue // version 2 next to version 1 has no controllers
		}
		name, named := strings.CutPrefix(controllers, "name=")
		options := controllers
		if named {
			options = "none," + controllers
		}
		path := filepath.Join(root, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
		if err := mountGroup("cgroup", path, options); err != nil {
			return err
		}
		for one := range strings.SplitSeq(name, ",") {
			if one != name {
				if err := os.Symlink(name, filepath.Join(root, one)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func mountGroup(kind, path, options string) error {
	if err := unix.Mount("cgroup", path, kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return fmt.Errorf("mounting the control group %s: %w", path, err)
	}
	return nil
}

// network names the node, and gives it a neighbour for the clients.
func (n *node) network() error {
	if err := unix.Sethostname([]byte(nodeName)); err != nil {
		return fmt.Errorf("naming the node: %w", err)
	}
	for _, dir := range []string{"/run/netns", "/run/lock"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	script := func(ns string, lines ...string) error {
		args := []string{"-batch", "-"}
		if ns != "" {
			args = append([]string{"-netns", ns}, args...)
		}
		_, _, err := n.run(strings.Join(lines, "\n")+"\n", "ip", args...)
		return err
	}
	err := script("",
		"link set lo up", "netns add client", "link add outside type veth peer name inside netns client",
		"addr add "+nodeIPv4+"/24 dev outside", "addr add "+nodeIPv6+"/64 dev outside nodad", "link set outside up",
		"route add default via "+clientIPv4, "route add ::/0 via "+clientIPv6)
	if err != nil {
		return err
	}
	err = script("client",
		"link set lo up", "addr add "+clientIPv4+"/24 dev inside", "addr add "+clientIPv6+"/64 dev inside nodad",
		"link set inside up", "route add "+externalIPv4+" via "+nodeIPv4)
	if err != nil {
		return err
	}
	for _, setting := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+setting, []byte("1"), 0); err != nil {
			return err
		}
	}
	n.client, err = enter("/run/netns/client")
	return err
}

// A place is a network namespace other than the node's.
type place struct{ there, home int }

func enter(path string) (*place, error) {
	var p place
	for path, fd := range map[string]*int{path: &p.there, "/proc/self/ns/net": &p.home} {
		var err error
		if *fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return nil, fmt.Errorf("opening %s: %w", path, err)
		}
	}
	return &p, nil
}

// in runs do on a thread in the namespace. Sockets that do makes stay there.
func (p *place) in(do func() error) error {
	runtime.LockOSThread()
	if err := unix.Setns(p.there, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("entering a network namespace: %w", err)
	}
	defer func() {
		// Without a way back the thread stays locked, and ends with its goroutine.
		if err := unix.Setns(p.home, unix.CLONE_NEWNET); err == nil {
			runtime.UnlockOSThread()
		}
	}()
	return do()
}
