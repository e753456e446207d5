package flushers

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// unpacked is hack/install-deps.sh's folder of the distribution's packages.
	unpacked = "/var/cache/canaryd-test/flushers"
	// layers has the files that are written to a machine's folders.
	layers = "/run/layers"
	// flusherPath is the PATH of the flushers. Its iptables is that of the machine's
	// alternatives.
	flusherPath = "/usr/sbin:/usr/bin:/sbin:/bin"
)

// A machine is a node with a distribution's firewalls. Its /usr and /etc are those of this
// machine, overlaid with the packages, and files written there are deleted with the test.
// Alternatives lead iptables to the backend under test.
type machine struct {
	*nodetest.Node
	unpacks bool // its flusher was unpacked
	hurry   bool // nothing is measured: a slow flusher need not pause
	runs    []*service
}

// machineOf makes a machine of a node, for that flusher.
func machineOf(n *nodetest.Node, f flusher) *machine {
	n.Helper()
	nstest.NeedRoot(n.T) // a root mapped to "nobody" in a user namespace cannot use the files
	for _, path := range f.unpacked {
		nstest.NeedFile(n.T, filepath.Join(unpacked, path))
	}
	nstest.NeedFile(n.T, append(f.needs, "/etc/alternatives/iptables")...)
	nstest.NeedProgram(n.T, "ipset")
	m := &machine{Node: n, unpacks: len(f.unpacked) > 0}
	n.Cleanup(func() {
		for len(m.runs) > 0 {
			m.kill(m.runs[0])
		}
	})
	m.lay("/usr")
	return m
}

// reset gives the machine an untouched /etc and /var/lib, and no rules.
func (m *machine) reset() {
	m.Helper()
	for len(m.runs) > 0 {
		m.kill(m.runs[0])
	}
	for _, dir := range []string{"/etc", "/var/lib", "/var/log"} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // not mounted yet
			m.Fatalf("unmounting %s: %v", dir, err)
		}
	}
	m.lay("/etc")
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			link := "/etc/alternatives/" + program + suffix
			m.Must(os.Remove(link))
			m.Must(os.Symlink("/usr/sbin/"+program+"-"+string(m.Programs.With)+suffix, link))
		}
	}
	for _, dir := range []string{"/var/lib", "/var/log"} {
		m.Must(unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"))
	}
	m.Must(scenario.Wipe(m.Context(), m.Programs, rules.Families()...))
	for _, family := range rules.Families() {
		m.Must(m.Programs.Restore(m.Context(), family, "*raw\n:PREROUTING ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"))
	}
	nstest.Command(m.T, "nft", "flush", "ruleset")
	nstest.Command(m.T, "ipset", "destroy")
}

// lay overlays a folder with the unpacked packages, and with a layer for writes.
func (m *machine) lay(dir string) {
	m.Helper()
	top := filepath.Join(layers, dir)
	m.Must(os.RemoveAll(top))
	for _, kind := range []string{"upper", "work"} {
		m.Must(os.MkdirAll(filepath.Join(top, kind), 0o755))
	}
	below := dir
	if m.unpacks {
		below = filepath.Join(unpacked, dir) + ":" + dir
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", below, filepath.Join(top, "upper"), filepath.Join(top, "work"))
	if err := unix.Mount("overlay", dir, "overlay", 0, options); err != nil {
		m.Fatalf("laying the packages over %s: %v", dir, err)
	}
}

// write writes a configuration file.
func (m *machine) write(path, text string) {
	m.Helper()
	m.Must(os.MkdirAll(filepath.Dir(path), 0o755))
	m.Must(os.WriteFile(path, []byte(text), 0o640))
}

// edit replaces a text that occurs once in a configuration file.
func (m *machine) edit(path, from, to string) {
	m.Helper()
	text, err := os.ReadFile(path)
	m.Must(err)
	if strings.Count(string(text), from) != 1 {
		m.Fatalf("%s has not one %q:\n%s", path, from, text)
	}
	m.Must(os.WriteFile(path, []byte(strings.Replace(string(text), from, to, 1)), 0o640))
}

// command returns a command of the machine's administrator.
func (m *machine) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(m.Context(), "/usr/bin/env", append([]string{"-i", "PATH=" + flusherPath, "LC_ALL=C.UTF-8", name}, args...)...)
	cmd.Dir = "/"
	return cmd
}

// run runs a command that must not fail, and returns its output.
func (m *machine) run(name string, args ...string) string {
	m.Helper()
	out, err := m.command(name, args...).CombinedOutput()
	if err != nil {
		m.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// A service runs until it is stopped.
type service struct {
	cmd   *exec.Cmd
	out   bytes.Buffer
	ended chan struct{}
	err   error
}

// launch starts a service in the foreground.
func (m *machine) launch(name string, args ...string) *service {
	m.Helper()
	s := &service{cmd: m.command(name, args...), ended: make(chan struct{})}
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	m.Must(s.cmd.Start())
	go func() { s.err = s.cmd.Wait(); close(s.ended) }()
	m.runs = append(m.runs, s)
	return s
}

// until waits until a command succeeds, and returns its output. It fails the test if the
// service ends.
func (m *machine) until(s *service, name string, args ...string) string {
	m.Helper()
	var out []byte
	m.Until(strings.Join(append([]string{name}, args...), " "), func() error {
		select {
		case <-s.ended:
			m.Fatalf("%s ended: %v\n%s", s.cmd, s.err, &s.out)
		default:
		}
		var err error
		if out, err = m.command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return string(out)
}

// stop ends a service as a service manager does.
func (m *machine) stop(s *service) {
	m.Helper()
	m.Must(s.cmd.Process.Signal(syscall.SIGTERM))
	m.gone(s)
}

// gone waits for the end of a service that received a request to end.
func (m *machine) gone(s *service) {
	m.Helper()
	testkit.Receive(m, s.ended, fmt.Sprintf("%s to end", s.cmd))
	m.forget(s)
}

func (m *machine) kill(s *service) {
	_ = s.cmd.Process.Kill() // an error means that it has ended
	<-s.ended
	m.forget(s)
	if m.Failed() {
		m.Logf("%s:\n%s", s.cmd, &s.out)
	}
}

func (m *machine) forget(s *service) {
	m.runs = slices.DeleteFunc(m.runs, func(r *service) bool { return r == s })
}

// natives returns nft's own tables, without iptables'.
func (m *machine) natives() []string {
	m.Helper()
	var all []string
	for line := range strings.Lines(nstest.Command(m.T, "nft", "list", "tables")) {
		words := strings.Fields(line) // table inet firewalld
		if xtables := words[1] == "ip" || words[1] == "ip6"; xtables {
			continue
		}
		text := nstest.Command(m.T, "nft", "-s", "list", "table", words[1], words[2])
		all = append(all, strings.Split(strings.TrimSpace(text), "\n")...)
	}
	return all
}
