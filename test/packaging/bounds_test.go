package packaging

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// runtimeSockets are the sockets of container runtimes. A process that can write there is root
// on the node.
var runtimeSockets = []string{
	"/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/podman/podman.sock", "/run/k3s/containerd/containerd.sock", "/run/cri-dockerd.sock",
}

// TestRuntimesAreOutOfReach: canaryd cannot connect to a runtime that runs at its start. It
// sees the rest of /run, and takes the present lock after a deletion and a new creation.
func TestRuntimesAreOutOfReach(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.installed("--backend=" + string(n.Programs.With))
		for _, path := range runtimeSockets {
			n.Must(os.MkdirAll(filepath.Dir(path), 0o755))
			l, err := net.Listen("unix", path)
			n.Must(err)
			n.Cleanup(func() { l.Close() })
		}
		write(t, m.root()+"/var/lib/cni/results/cni-0", "{}")
		m.must("systemctl", "start", "canaryd.service")
		root := fmt.Sprintf("/proc/%d/root", m.process())
		for _, path := range runtimeSockets {
			conn, err := net.Dial("unix", path)
			n.Must(err) // otherwise the test would show nothing
			conn.Close()
			if conn, err := net.Dial("unix", root+path); err == nil {
				conn.Close()
				n.Errorf("canaryd can connect to %s", path)
			}
		}
		if text, err := os.ReadFile(root + "/var/lib/cni/results/cni-0"); err != nil || string(text) != "{}" {
			n.Errorf("canaryd reads of libcni's files %q, %v", text, err)
		}

		// iptables makes another lock, and the service sees the same file.
		_ = os.Remove("/run/xtables.lock") // on nft it may not exist
		nstest.Command(t, "iptables-legacy", "-w", "5", "-t", "filter", "-S")
		here, err := os.Stat("/run/xtables.lock")
		n.Must(err)
		if there, err := os.Stat(root + "/run/xtables.lock"); err != nil || !os.SameFile(here, there) {
			n.Errorf("canaryd's xtables lock is another file than the node's: %v", err)
		}
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", before, n.Protected())
	})
}

// TestNoOtherAddresses: under the unit canaryd talks only to the node, also if it listens at
// every address, until a drop-in names other addresses.
func TestNoOtherAddresses(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		const other = "192.0.2.1"
		nstest.Command(t, "ip", "address", "add", other+"/32", "dev", "lo")
		m := boot(n)
		m.installed("--backend=nft --metrics-bind-address=:9475")
		get := func() error {
			client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Second}
			response, err := client.Get("http://" + other + ":9475/healthz")
			if err != nil {
				return err
			}
			response.Body.Close()
			return nil
		}
		m.must("systemctl", "start", "canaryd.service")
		n.Until("an answer on the loopback", nodetest.Ready)
		var timeout net.Error
		if err := get(); !errors.As(err, &timeout) || !timeout.Timeout() {
			n.Errorf("at %s: got %v, want no answer", other, err)
		}
		n.Flush()
		n.Healed(1)
		n.Same("protected rules", before, n.Protected())

		// The drop-in is copied from deploy/README.md.
		readme := source(t, "deploy/README.md")
		const line = "    IPAddressAllow=192.0.2.0/24\n"
		if !strings.Contains(readme, line) {
			t.Fatalf("deploy/README.md has no line %q", line)
		}
		write(t, "/run/systemd/system/canaryd.service.d/address.conf", "[Service]\n"+strings.TrimSpace(line)+"\n")
		m.must("systemctl", "daemon-reload")
		m.must("systemctl", "restart", "canaryd.service")
		n.Until("an answer at "+other, get)
	})
}

// TestMemoryOfTheUnit: the unit has the manifest's limit and no swap, because a guard that
// waits for the disk heals nothing.
func TestMemoryOfTheUnit(t *testing.T) {
	t.Parallel()
	_, manifest, _ := strings.Cut(source(t, "deploy/kubernetes/base/daemonset.yaml"), "limits:")
	_, manifest, _ = strings.Cut(manifest, "memory: ")
	manifest, _, _ = strings.Cut(manifest, "i\n")
	got := map[string]string{}
	for line := range strings.Lines(source(t, unitFile)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && strings.HasPrefix(name, "Memory") {
			got[name] = value
		}
	}
	want := map[string]string{"MemoryMax": manifest, "MemorySwapMax": "0", "MemoryDenyWriteExecute": "yes"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
