// Package netns runs this program again in a network namespace and a mount namespace of its
// own. There, tests and the demo can flush all tables without affecting the machine's.
//
// The whole process is cloned into the namespaces. So each of its threads is inside, and no
// goroutine must stay on one thread.
package netns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrImpossible means that this process may not create namespaces.
var ErrImpossible = errors.New("network namespaces need root or user namespaces")

// sbin are the folders of iptables, which some users do not have in their PATH.
var sbin = []string{"/usr/local/sbin", "/usr/sbin", "/sbin"}

// Command returns a command that runs this program again, with args, in a network and a mount
// namespace of its own. The child finds value in the environment variable marker: see Inside.
// It must call Setup first. An error is ErrImpossible with the kernel's reason.
//
// The child is killed when the thread that started it ends. So a goroutine that starts it locks
// itself to its thread until Wait returns, as in Run.
func Command(ctx context.Context, marker, value string, args ...string) (*exec.Cmd, error) {
	attr, err := attributes()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), marker+"="+value)
	cmd.SysProcAttr = attr()
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	return cmd, nil
}

// Run runs a command that Command returned, and waits for its end.
func Run(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// Inside returns the value from Command, and whether Command started this process. It removes
// the marker from the environment of child processes.
func Inside(marker string) (value string, inside bool) {
	value, inside = os.LookupEnv(marker)
	if inside {
		// Unsetenv fails only for names that LookupEnv does not find.
		_ = os.Unsetenv(marker)
	}
	return value, inside
}

// Setup makes the namespaces usable from inside. Mounts no longer propagate, the loopback
// interface is up, and /run is empty. Each program that writes iptables rules locks
// /run/xtables.lock, and two namespaces must not share a lock.
//
// /proc/net and /proc/sys/net follow the namespace by themselves. /sys still shows the machine's
// interfaces, but no test reads it.
func Setup() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return refused("keeping mounts private", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return refused("mounting an empty /run", err)
	}
	if err := loopbackUp(); err != nil {
		return refused("bringing the loopback interface up", err)
	}
	return ExtendPath()
}

// ExtendPath adds the folders of administrators' programs to PATH.
func ExtendPath() error {
	path := strings.Split(os.Getenv("PATH"), ":")
	for _, dir := range sbin {
		if !slices.Contains(path, dir) {
			path = append(path, dir)
		}
	}
	return os.Setenv("PATH", strings.Join(path, ":"))
}

// Root reports whether this process is root of the machine, and not only of a user namespace.
func Root() bool {
	if os.Geteuid() != 0 {
		return false
	}
	ids, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
}

func refused(what string, err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (%s: %w)", ErrImpossible, what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, lo); err != nil {
		return err
	}
	lo.SetUint16(lo.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}

// attributes tries once which way into new namespaces the kernel allows: the direct way, or a
// user namespace. Having the user ID 0 is not enough: root of a container usually may not.
var attributes = sync.OnceValues(func() (func() *syscall.SysProcAttr, error) {
	probe := func(attr *syscall.SysProcAttr) error {
		cmd := exec.Command("true")
		cmd.SysProcAttr = attr
		return cmd.Run()
	}
	err := probe(straight())
	if err == nil {
		return straight, nil
	}
	if userErr := probe(throughUser()); userErr != nil {
		return nil, fmt.Errorf("%w (%w; with a user namespace: %w)", ErrImpossible, err, userErr)
	}
	return throughUser, nil
})

func straight() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
}

// throughUser makes the user namespace first, and the others when its IDs are mapped. Otherwise
// the network namespace's owner would have no root yet, and the kernel would give its
// /proc/net/ip_tables_names to the machine's root. No process inside could read it.
func throughUser() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	return attr
}
