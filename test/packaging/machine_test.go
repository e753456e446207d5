package packaging

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
)

// startup runs in process 1 before that becomes systemd. Its root is this machine's, under a
// layer in memory for writes.
const startup = `set -eu
dir=$1
root=$dir/root
mkdir -p "$dir/upper" "$dir/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" "$root"
mount --bind /run "$root/run"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/run/old"
cd "$root"
pivot_root . run/old
umount -l /run/old
exec env -i container=canaryd-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	/lib/systemd/systemd --system --unit=canaryd-test.target --log-target=console --log-level=info --show-status=no`

// A machine is a node whose services run under a systemd of its own. It has the node's network
// and /run, so that clients find canaryd.
type machine struct {
	*nodetest.Node
	pid int // systemd's, in the test's own pid namespace
	log *testlog.Log
}

// canarydLog is the log file of the machine's canaryd, because there is no journal.
const canarydLog = "/run/canaryd.log"

// boot starts a machine with only systemd in it.
func boot(n *nodetest.Node) *machine {
	n.Helper()
	nstest.NeedRoot(n.T)
	nstest.NeedProgram(n.T, "/lib/systemd/systemd", "systemctl", "unshare", "nsenter")
	write(n.T, "/run/systemd/system/canaryd-test.target", "[Unit]\nDefaultDependencies=no\n")
	write(n.T, "/run/systemd/system/canaryd.service.d/log.conf", "[Service]\nStandardOutput=append:"+canarydLog+"\nStandardError=inherit\n")

	group := controlGroup(n)
	m := &machine{Node: n, log: &testlog.Log{}}
	cmd := exec.CommandContext(n.Context(), "unshare", "--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc",
		"sh", "-c", startup, "boot", "/run/machine")
	cmd.Stdout, cmd.Stderr = m.log, m.log
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Pdeathsig: syscall.SIGKILL}
	n.Must(cmd.Start())
	n.Cleanup(func() {
		_ = cmd.Process.Kill() // an error means that it has ended
		_ = cmd.Wait()         // ended by our signal
		removeGroup(n, group.Name())
		if n.Failed() {
			log, _ := os.ReadFile(canarydLog) // the log may not exist yet
			n.Logf("systemd:\n%s\ncanaryd:\n%s", m.log, log)
		}
	})
	n.Until("systemd to run", func() error {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
		if err != nil {
			return err
		}
		if _, err := fmt.Sscan(string(children), &m.pid); err != nil {
			return fmt.Errorf("unshare has no child: %w", err)
		}
		if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", m.pid)); err != nil || string(comm) != "systemd\n" {
			return fmt.Errorf("process 1 is still %q (%w)", comm, err)
		}
		code, stdout, stderr := m.run("systemctl", "is-active", "canaryd-test.target")
		if code != 0 {
			return fmt.Errorf("%s%s", stdout, stderr)
		}
		return nil
	})
	return m
}

// controlGroup makes the machine's control group.
func controlGroup(n *nodetest.Node) *os.File {
	n.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	n.Must(err)
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); f[2] == "cgroup2" {
			dir, err := os.MkdirTemp(f[1], "canaryd-test-")
			n.Must(err)
			file, err := os.Open(dir)
			n.Must(err)
			return file
		}
	}
	n.Fatal("no cgroup2 is mounted, and systemd needs one")
	return nil
}

// removeGroup removes a control group and its children, once their processes are gone.
func removeGroup(n *nodetest.Node, dir string) {
	n.Helper()
	n.Until("the control groups to be empty", func() error {
		var dirs []string
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		slices.Reverse(dirs)
		for _, d := range dirs {
			if err == nil {
				err = os.Remove(d)
			}
		}
		return err
	})
}

// run runs a program inside the machine.
func (m *machine) run(name string, args ...string) (code int, stdout, stderr string) {
	m.Helper()
	words := append([]string{"--target", fmt.Sprint(m.pid), "--mount", "--pid", "--cgroup", "--", name}, args...)
	return m.Exec(exec.CommandContext(m.Context(), "nsenter", words...))
}

// must runs a program inside the machine and returns its output. Another exit code than 0 ends
// the test.
func (m *machine) must(name string, args ...string) string {
	m.Helper()
	code, stdout, stderr := m.run(name, args...)
	if code != 0 {
		m.Fatalf("%s %s: exit code %d\n%s%s", name, strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout
}

// show returns a property of canaryd's service.
func (m *machine) show(property string) string {
	m.Helper()
	return strings.TrimSpace(m.must("systemctl", "show", "--value", "-p", property, "canaryd.service"))
}

// installed installs canaryd and its unit in the machine's root.
func (m *machine) installed(flags string) {
	m.Helper()
	install(m.T, m.root(), "/usr/local")
	write(m.T, m.root()+"/etc/default/canaryd", "CANARYD_FLAGS=\""+flags+"\"\n")
	m.must("systemctl", "daemon-reload")
}

// process returns the daemon's process number in the test's pid namespace. Other tests'
// machines have a canaryd with the same number inside.
func (m *machine) process() int {
	m.Helper()
	inside := m.show("MainPID")
	namespace := func(pid string) string {
		link, _ := os.Readlink("/proc/" + pid + "/ns/pid") // a process that has ended has none
		return link
	}
	ours := namespace(strconv.Itoa(m.pid))
	if ours == "" {
		m.Fatalf("systemd, process %d, has ended", m.pid)
	}
	tasks, err := filepath.Glob("/proc/[0-9]*/status")
	m.Must(err)
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// The last word is the number in the innermost namespace.
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); f[0] == "NSpid:" && len(f) > 2 && f[len(f)-1] == inside && strings.HasPrefix(string(text), "Name:\tcanaryd\n") && namespace(f[1]) == ours {
				var pid int
				_, err := fmt.Sscan(f[1], &pid)
				m.Must(err)
				return pid
			}
		}
	}
	m.Fatalf("there is no canaryd with process number %s", inside)
	return 0
}
