//go:build cluster

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A node is the cluster's machine: the namespaces of this process.
type node struct {
	*testing.T
	backend iptables.Backend
	dir     string // the node's files, a folder for each backend
	env     []string
	daemons *[]*daemon
	client  *place
	results *results
}

// newNode isolates this process further, and makes the node's network. It refuses to touch the
// machine's own namespaces.
func newNode(t *testing.T, backend iptables.Backend) *node {
	t.Helper()
	work := os.Getenv("CANARYD_TEST_CLUSTER")
	if work == "" {
		t.Fatal("hack/cluster.sh starts this test: make cluster")
	}
	n := &node{T: t, backend: backend, dir: filepath.Join(work, string(backend)), daemons: new([]*daemon), results: new(results)}
	n.needNamespaces(strings.Fields(os.Getenv("CANARYD_TEST_CLUSTER_OUTSIDE")))
	n.must(n.mount())
	n.must(os.Setenv("PATH", n.path(work)))
	// kubectl keeps its cache there.
	n.must(os.Setenv("HOME", n.dir))
	n.must(os.Setenv("KUBECONFIG", filepath.Join(n.dir, "admin.kubeconfig")))
	n.env = os.Environ()
	n.must(n.network())
	return n
}

// needNamespaces fails the test if this process is in a namespace of the machine.
func (n *node) needNamespaces(outside []string) {
	n.Helper()
	kinds := []string{"cgroup", "ipc", "mnt", "net", "pid", "uts"}
	if len(outside) != len(kinds) {
		n.Fatalf("the machine's namespaces are not known: %q", outside)
	}
	for _, kind := range kinds {
		here, err := os.Readlink("/proc/self/ns/" + kind)
		n.must(err)
		if slices.Contains(outside, here) {
			n.Fatalf("%s is the machine's own: hack/cluster.sh starts this test", here)
		}
	}
	links, err := net.Interfaces()
	n.must(err)
	if len(links) != 1 {
		n.Fatalf("the network has %d interfaces before there is a node", len(links))
	}
}

// path returns a PATH whose iptables is the backend's, as with Debian's alternatives.
func (n *node) path(work string) string {
	n.Helper()
	alternatives := filepath.Join(n.dir, "alternatives")
	n.must(os.Mkdir(alternatives, 0o755))
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-restore", "-save"} {
			program, err := exec.LookPath(base + "-" + string(n.backend) + suffix)
			n.must(err)
			n.must(os.Symlink(program, filepath.Join(alternatives, base+suffix)))
		}
	}
	return strings.Join([]string{alternatives, filepath.Join(work, "programs"), os.Getenv("PATH")}, ":")
}

func (n *node) must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// file writes a file of the node, and returns its path.
func (n *node) file(name, text string) string {
	n.Helper()
	path := filepath.Join(n.dir, name)
	n.must(os.MkdirAll(filepath.Dir(path), 0o755))
	n.must(os.WriteFile(path, []byte(text), 0o600))
	return path
}

// run runs a program to its end, and returns its output.
func (n *node) run(input, name string, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(n.Context(), name, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), errs.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), errs.String(), nil
}

// want runs a program, and returns its standard output. If the program fails, so does the test.
func (n *node) want(name string, args ...string) string {
	n.Helper()
	return n.wantInput("", name, args...)
}

func (n *node) wantInput(input, name string, args ...string) string {
	n.Helper()
	out, _, err := n.run(input, name, args...)
	n.must(err)
	return out
}

// until waits until done returns nil, and returns the time that took. It fails the test if a
// daemon ends meanwhile.
func (n *node) until(what string, done func() error) time.Duration {
	n.Helper()
	return testkit.Until(n.T, what, func() error {
		for _, d := range *n.daemons {
			if d.over() {
				n.Fatalf("waiting for %s: %s has ended:\n%s", what, d.name, d.tail(40))
			}
		}
		return done()
	})
}

// A daemon is a program that runs until the namespaces end.
type daemon struct {
	name  string
	log   string // path
	ended chan struct{}
}

// start starts a daemon.
func (n *node) start(name string, args ...string) {
	n.Helper()
	d := &daemon{name: name, log: filepath.Join(n.dir, name+".log"), ended: make(chan struct{})}
	out, err := os.Create(d.log)
	n.must(err)
	defer out.Close()
	// The daemon outlives its subtest.
	cmd := exec.CommandContext(context.Background(), name, args...)
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = n.env, n.dir, out, out
	n.must(cmd.Start())
	go func() { _ = cmd.Wait(); close(d.ended) }() // any end is the error
	*n.daemons = append(*n.daemons, d)
}

func (d *daemon) over() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

// tail returns the last lines of a daemon's log.
func (d *daemon) tail(lines int) string {
	file, err := os.Open(d.log)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	const last = 64 << 10
	if info, err := file.Stat(); err == nil && info.Size() > last {
		_, err = file.Seek(-last, io.SeekEnd)
		if err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(file)
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n") + errorText(err)
}

func errorText(err error) string {
	if err == nil || errors.Is(err, io.EOF) {
		return ""
	}
	return "\n" + err.Error()
}

// tails logs the ends of all logs.
func (n *node) tails() {
	for _, d := range *n.daemons {
		n.Logf("%s:\n%s", d.name, d.tail(15))
	}
}
