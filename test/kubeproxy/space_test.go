package kubeproxy

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// Addresses of the node, in each namespace.
const (
	nodeIPv4 = "192.0.2.1"
	nodeIPv6 = "2001:db8::1"
)

// A space is a network namespace with a kube-proxy. canaryd runs in the first one, which is
// this process's own.
type space struct {
	name     string
	fd, home int // the namespace, and this process's own
	programs scenario.Programs
	env      []string // for its programs
}

// newSpaces makes namespaces of these names; the first one is this process's own. There
// iptables is the backend's program, and each namespace has its own xtables lock.
func newSpaces(t *testing.T, backend iptables.Backend, names ...string) []*space {
	t.Helper()
	path := alternatives(t, backend)
	home, err := unix.Open("/proc/self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var all []*space
	for i, name := range names {
		s := &space{name: name, fd: home, home: home, programs: scenario.Programs{With: backend}, env: append(os.Environ(), "PATH="+path)}
		if i > 0 {
			nstest.Command(t, "ip", "netns", "add", name)
			if s.fd, err = unix.Open("/run/netns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
				t.Fatal(err)
			}
			s.programs.Lock = "/run/" + name + ".lock"
			s.env = append(s.env, "XTABLES_LOCKFILE="+s.programs.Lock)
		}
		err := s.in(func() error {
			cmd := exec.CommandContext(t.Context(), "ip", "-batch", "-")
			cmd.Stdin = strings.NewReader("link set lo up\naddr add " + nodeIPv4 + "/32 dev lo\naddr add " + nodeIPv6 + "/128 dev lo nodad\n")
			out, err := cmd.CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

// alternatives returns a PATH in which iptables and its like are the backend's programs, as
// with Debian's alternatives.
func alternatives(t *testing.T, backend iptables.Backend) string {
	t.Helper()
	dir := t.TempDir()
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-restore", "-save"} {
			program, err := exec.LookPath(base + "-" + string(backend) + suffix)
			if err == nil {
				err = os.Symlink(program, filepath.Join(dir, base+suffix))
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir + ":" + os.Getenv("PATH")
}

// in runs do on a thread in the namespace. Sockets and processes that do makes stay there.
func (s *space) in(do func() error) error {
	runtime.LockOSThread()
	if err := unix.Setns(s.fd, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("entering the namespace %s: %w", s.name, err)
	}
	defer func() {
		// Without a way back the thread stays locked, and ends with its goroutine.
		if err := unix.Setns(s.home, unix.CLONE_NEWNET); err == nil {
			runtime.UnlockOSThread()
		}
	}()
	return do()
}

// command returns a program that in must start.
func (s *space) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = s.env
	return cmd
}

// run runs a program in the namespace, and returns its output.
func (s *space) run(ctx context.Context, input, name string, args ...string) (string, error) {
	var text string
	err := s.in(func() error {
		cmd := s.command(ctx, name, args...)
		cmd.Stdin = strings.NewReader(input)
		var errs strings.Builder
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if text = string(out); err != nil {
			return fmt.Errorf("%s %s in %s: %w: %s", name, strings.Join(args, " "), s.name, err, strings.TrimSpace(errs.String()))
		}
		return nil
	})
	return text, err
}

// client returns an HTTP client that connects from the namespace.
func (s *space) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			err = s.in(func() error { conn, err = new(net.Dialer).DialContext(ctx, network, address); return err })
			return conn, err
		}}}
}
