// Package netns runs this very program again in a network namespace and a
// mount namespace of its own, so that tests and the demo can flush every table
// there is without touching the machine's.
//
// The program is cloned into its namespaces as a whole, so every thread of it
// is inside; no goroutine has to hold on to a thread.
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

// ErrImpossible says that this process may not have namespaces of its own.
var ErrImpossible = errors.New("network namespaces need root or user namespaces")

// sbin is where iptables lives; it is not in everybody's PATH.
var sbin = []string{"/usr/local/sbin", "/usr/sbin", "/sbin"}

// Command returns a command that runs this program again, with args, in a
// network and a mount namespace of its own. The child finds value under the
// environment variable marker, tells by it that it is inside, and calls Setup
// first. The error, if any, is ErrImpossible with the kernel's reason.
//
// The child is killed when the thread that started it ends: whoever starts it
// from a goroutine locks that goroutine to its thread until Wait returns, as
// Run does.
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

// Run runs a command of Command's and waits for it.
func Run(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// Inside returns the value under which Command started this process, and
// whether it did. It hides the marker from the processes that this one starts.
func Inside(marker string) (value string, inside bool) {
	value, inside = os.LookupEnv(marker)
	if inside {
		// Unsetenv fails only for names that LookupEnv does not find.
		_ = os.Unsetenv(marker)
	}
	return value, inside
}

// Setup makes the namespaces usable from inside: mounts no longer propagate,
// /run is empty and our own (every program that writes iptables rules locks
// /run/xtables.lock, and two namespaces must not share one lock), and the
// loopback interface is up.
//
// /proc/net and /proc/sys/net follow the task's namespace by themselves; /sys
// still shows the machine's interfaces and nothing here reads it.
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

// ExtendPath adds the folders for administrators' programs to PATH.
func ExtendPath() error {
	path := strings.Split(os.Getenv("PATH"), ":")
	for _, dir := range sbin {
		if !slices.Contains(path, dir) {
			path = append(path, dir)
		}
	}
	return os.Setenv("PATH", strings.Join(path, ":"))
}

// Root reports whether this process is root of the machine and not merely of a
// user namespace.
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

// attributes tries, once, which way into new namespaces the kernel allows:
// the straight one for those who may, else through a user namespace. Being
// uid 0 decides nothing: root of a container usually may not.
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

// throughUser makes the user namespace first and the others only when its ids
// are mapped: a network namespace whose owner has no root yet hands its
// /proc/net/ip_tables_names to the machine's root, and nobody inside may read it.
func throughUser() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	return attr
}
