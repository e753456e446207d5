package here

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
)

// Identify returns the identity for generations that are stored now: this boot, this network
// namespace, and the iptables that info describes. A generation of another identity is not
// replayed.
func Identify(info iptables.Info) (reload.Identity, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return reload.Identity{}, fmt.Errorf("reading the boot ID: %w", err)
	}
	netns, err := namespaceID()
	if err != nil {
		return reload.Identity{}, fmt.Errorf("identifying the network namespace: %w", err)
	}
	return reload.Identity{
		BootID: strings.TrimSpace(string(boot)), NetNS: netns,
		Backend: string(info.Backend), Version: info.Version,
	}, nil
}

// Uptime returns how long the machine has been up, including its sleep. Unlike the wall clock
// it cannot be set. It is the same for all processes of a boot, except in a time namespace.
func Uptime() time.Duration {
	var now unix.Timespec
	// It fails only for a clock that does not exist; this one does since 2.6.39.
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return time.Duration(now.Nano())
}

// namespaceID returns the namespace's cookie, which is unique within a boot (SO_NETNS_COOKIE,
// Linux 5.14). An older kernel only has the inode number.
func namespaceID() (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if closeErr := unix.Close(fd); closeErr != nil {
		return "", closeErr
	}
	if err == nil {
		return fmt.Sprintf("cookie:%d", cookie), nil
	}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &stat); err != nil {
		return "", err
	}
	return fmt.Sprintf("inode:%d", stat.Ino), nil
}

// BootedAt returns the boot time of a machine that has been up for so long.
func BootedAt(uptime time.Duration) time.Time { return time.Now().Add(-uptime) }
