package kernels

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/versions"
)

const (
	// introduction begins the line in which the machine names its kernel and programs.
	introduction = "machine: "
	// lastWords are the last line before the machine is switched off.
	lastWords = "machine: the tests have ended"
)

// isFirstProcess reports whether the kernel started this program as its first.
func isFirstProcess() bool { return os.Getpid() == 1 }

// runMachine prepares the machine, runs the tests and switches it off.
func runMachine(m *testing.M) int {
	if err := prepareMachine(); err != nil {
		fmt.Println(introduction, err)
	} else {
		m.Run()
		fmt.Println("\n" + lastWords)
	}
	unix.Sync()
	fmt.Println(introduction, unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	return 1
}

// prepareMachine mounts the file systems that programs need, and prints the line that names the
// machine.
func prepareMachine() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"}} {
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mounting %s: %w", m.at, err)
		}
	}
	if err := os.Symlink("/proc/self/fd/0", "/dev/stdin"); err != nil {
		return err // nft reads /dev/stdin by that name
	}
	for name, value := range map[string]string{"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "CI": "true"} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return fmt.Errorf("asking for the kernel's release: %w", err)
	}
	words := []string{"Linux " + unix.ByteSliceToString(uts.Release[:]) + " " + unix.ByteSliceToString(uts.Machine[:])}
	for _, program := range []string{"iptables-nft", "nft"} {
		out, err := exec.Command(program, "--version").Output()
		if err != nil {
			return fmt.Errorf("asking %s for its version: %w", program, err)
		}
		words = append(words, strings.TrimSuffix(program, "-nft")+" "+versions.Number(string(out)))
	}
	fmt.Println(introduction + strings.Join(words, ", "))
	return nil
}
