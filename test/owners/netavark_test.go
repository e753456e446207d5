package owners

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// netavarkRoot is the folder into which hack/netavark.sh unpacked Debian's
// netavark and its dependencies.
const netavarkRoot = "/var/cache/canaryd-test/netavark"

// A podmanNode is a node on which netavark connects containers, as it does for
// podman.
type podmanNode struct {
	*nodetest.Node
	tools string
}

// unpacked makes a program of netavarkRoot executable on this system.
func (n podmanNode) unpacked(program, path string) {
	n.Helper()
	libraries := filepath.Join(netavarkRoot, "usr/lib/x86_64-linux-gnu")
	text := fmt.Sprintf("#!/bin/sh\nexec %s/ld-linux-x86-64.so.2 --library-path %s %s \"$@\"\n", libraries, libraries, filepath.Join(netavarkRoot, path))
	n.Must(os.WriteFile(filepath.Join(n.tools, program), []byte(text), 0o755))
}

// netavark runs netavark for a container of the network podman. It executes nft
// of the same release.
func (n podmanNode) netavark(command, name string, address, port int) {
	n.Helper()
	type object = map[string]any
	input, err := json.Marshal(object{
		"container_id": strings.Repeat("0", 60) + fmt.Sprintf("%04d", address), "container_name": name,
		"port_mappings": []object{{"host_ip": "", "container_port": 80, "host_port": port, "range": 1, "protocol": "tcp"}},
		"networks":      object{"podman": object{"interface_name": "eth0", "static_ips": []string{fmt.Sprintf("10.89.0.%d", address)}}},
		"network_info": object{"podman": object{
			"name": "podman", "id": strings.Repeat("2f259bab", 8), "driver": "bridge", "network_interface": "podman0",
			"subnets":      []object{{"subnet": "10.89.0.0/24", "gateway": "10.89.0.1"}},
			"ipv6_enabled": false, "internal": false, "dns_enabled": false, "ipam_options": object{"driver": "host-local"},
		}},
	})
	n.Must(err)
	cmd := exec.CommandContext(n.Context(), filepath.Join(n.tools, "netavark"), "--config", "/run/netavark", command, "/run/netns/"+name)
	cmd.Env = []string{"PATH=" + n.tools + ":/usr/sbin:/sbin:/usr/bin:/bin", "NETAVARK_FW=nftables"}
	cmd.Stdin = bytes.NewReader(input)
	if out, err := cmd.CombinedOutput(); err != nil {
		n.Fatalf("netavark %s for %s: %v: %s", command, name, err, out)
	}
}

// container connects a container, which serves its name.
func (n podmanNode) container(name string, address, port int) {
	n.Helper()
	nstest.Command(n.T, "ip", "netns", "add", name)
	n.netavark("setup", name, address, port)
	serve(n.Node, name)
}

func (n podmanNode) listed() string {
	n.Helper()
	return nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "netavark")
}

// proved waits until the node is healthy, with that many records.
func (n podmanNode) proved(records int) {
	n.Helper()
	n.Until("netavark's table", func() error {
		s := n.Status()
		if !s.Healthy || len(s.Flushes) != records {
			return fmt.Errorf("healthy %t with %d records, want %d", s.Healthy, len(s.Flushes), records)
		}
		for _, f := range s.Flushes {
			if f.Outcome != "proved" {
				return fmt.Errorf("a record is %s", f.Outcome)
			}
		}
		return nil
	})
}

// TestNetavark: the real netavark writes its rules once for each container. After
// each flush its table must be as before, and published ports must answer. Rules
// that netavark removes must stay removed. All commands of netavark must succeed
// in a table that canaryd has put back, and have the same result as without a
// flush.
func TestNetavark(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(node *nodetest.Node) {
		nstest.NeedRoot(node.T) // netavark makes interfaces and sets sysctls
		nstest.NeedProgram(node.T, "ip", "nft")
		nstest.NeedFile(node.T, filepath.Join(netavarkRoot, ".unpacked"))
		n := podmanNode{node, network(node)}
		n.unpacked("netavark", "usr/lib/podman/netavark")
		n.unpacked("nft", "usr/sbin/nft")
		n.container("gone", 9, 9000)
		n.netavark("teardown", "gone", 9, 9000)
		empty := n.listed() // netavark keeps its table

		n.container("first", 2, 8080)
		n.container("second", 3, 8081)
		p := n.Launch("--protect=podman")
		n.Until("canaryd to be ready", nodetest.Ready)
		n.proved(0)
		want := n.listed()
		flushes := []string{"flush ruleset", "flush table inet netavark", "flush ruleset inet"}
		for i, flush := range flushes {
			nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
			n.proved(i + 1)
			if got := n.listed(); got != want {
				n.Errorf("after %s the table is\n%s\nwant\n%s", flush, got, want)
			}
			answers(n.Node, "after "+flush, 8080, "first")
			answers(n.Node, "after "+flush, 8081, "second")
		}

		n.netavark("teardown", "first", 2, 8080)
		left := n.listed()
		if strings.Contains(left, "8080") {
			n.Fatalf("netavark left rules of a container in a table that was put back:\n%s", left)
		}
		nstest.Command(n.T, "nft", "flush", "ruleset") // at once: removed rules must stay removed
		n.proved(len(flushes) + 1)
		if got := n.listed(); got != left {
			n.Errorf("after a container was removed the table is\n%s\nwant\n%s", got, left)
		}
		answers(n.Node, "after a container was removed", 8080, "")
		answers(n.Node, "after a container was removed", 8081, "second")

		n.container("third", 4, 8082)
		answers(n.Node, "a container that came after a flush", 8082, "third")
		want = n.listed()
		nstest.Command(n.T, "nft", "flush", "ruleset")
		n.proved(len(flushes) + 2)
		if got := n.listed(); got != want {
			n.Errorf("after a container came the table is\n%s\nwant\n%s", got, want)
		}
		answers(n.Node, "at the end", 8081, "second")
		answers(n.Node, "at the end", 8082, "third")

		n.netavark("teardown", "second", 3, 8081)
		n.netavark("teardown", "third", 4, 8082)
		if got := n.listed(); got != empty {
			n.Errorf("after all containers have gone the table is\n%s\nwant\n%s", got, empty)
		}
		n.proved(len(flushes) + 2)
		p.Stop()
	})
}
