package owners

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// plugins is the folder of Debian's containernetworking-plugins.
const plugins = "/usr/lib/cni"

const (
	nodeAddress   = "192.0.2.1"
	clientAddress = "192.0.2.2"
)

// A pod is a network namespace that the CNI plugins connect.
type pod struct {
	name     string
	hostPort int
	result   json.RawMessage // the result of bridge
}

// cni runs a plugin as a container runtime does. The plugins execute "iptables",
// which in the folder tools is the backend's.
func cni(n *nodetest.Node, tools, command, plugin string, p pod) []byte {
	n.Helper()
	config := map[string]any{
		"cniVersion": "0.4.0", "name": "cbr0", "type": plugin,
		"bridge": "cni0", "isGateway": true, "ipMasq": true,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": "/run/cni-ipam", "subnet": "10.88.0.0/24", "routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
		},
	}
	if plugin == "portmap" {
		config = map[string]any{
			"cniVersion": "0.4.0", "name": "cbr0", "type": plugin, "snat": true, "prevResult": p.result,
			"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"hostPort": p.hostPort, "containerPort": 80, "protocol": "tcp"}}},
		}
	}
	input, err := json.Marshal(config)
	n.Must(err)
	cmd := exec.CommandContext(n.Context(), filepath.Join(plugins, plugin))
	cmd.Env = []string{
		"PATH=" + tools + ":/usr/sbin:/sbin:/usr/bin:/bin", "CNI_COMMAND=" + command, "CNI_CONTAINERID=" + p.name,
		"CNI_NETNS=/run/netns/" + p.name, "CNI_IFNAME=eth0", "CNI_PATH=" + plugins,
	}
	cmd.Stdin = strings.NewReader(string(input))
	out, err := cmd.Output()
	if err != nil {
		n.Fatalf("%s %s for %s: %v: %s", plugin, command, p.name, err, out)
	}
	return out
}

// inside runs do in a network namespace.
func inside[T any](n *nodetest.Node, space string, do func() (T, error)) (T, error) {
	n.Helper()
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		fd, err := unix.Open("/run/netns/"+space, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
		}
		var a answer
		if a.err = err; err == nil {
			a.value, a.err = do()
		}
		answers <- a
	}()
	a := <-answers
	return a.value, a.err
}

// add connects a pod and serves its name at its port 80.
func add(n *nodetest.Node, tools, name string, hostPort int) pod {
	n.Helper()
	nstest.Command(n.T, "ip", "netns", "add", name)
	p := pod{name: name, hostPort: hostPort}
	p.result = cni(n, tools, "ADD", "bridge", p)
	cni(n, tools, "ADD", "portmap", p)
	serve(n, name)
	return p
}

// serve makes a network namespace answer its name at its port 80.
func serve(n *nodetest.Node, name string) {
	n.Helper()
	listener, err := inside(n, name, func() (net.Listener, error) { return net.Listen("tcp4", ":80") })
	n.Must(err)
	n.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, name) // the client may have hung up
			conn.Close()
		}
	}()
}

// remove deletes a pod by the plugins' DEL, in the reverse order of ADD.
func remove(n *nodetest.Node, tools string, p pod) {
	n.Helper()
	cni(n, tools, "DEL", "portmap", p)
	cni(n, tools, "DEL", "bridge", p)
}

// dial connects to the node's port from outside and returns the answering pod's
// name, "" if none answers.
func dial(n *nodetest.Node, port int) string {
	n.Helper()
	return reach(n, fmt.Sprintf("%s:%d", nodeAddress, port))
}

func answers(n *nodetest.Node, when string, port int, want string) {
	n.Helper()
	if got := dial(n, port); got != want {
		saved, _ := n.Programs.Save(n.Context(), rules.IPv4)
		n.Fatalf("%s: %q answers at port %d, want %q\n%s", when, got, port, want, saved)
	}
}

// network makes the client and a folder in which "iptables" is the backend's.
func network(n *nodetest.Node) (tools string) {
	n.Helper()
	for _, args := range []string{
		"netns add client",
		"link add uplink type veth peer name eth0 netns client",
		"address add " + nodeAddress + "/24 dev uplink", "link set uplink up",
		"-n client address add " + clientAddress + "/24 dev eth0", "-n client link set eth0 up", "-n client link set lo up",
	} {
		nstest.Command(n.T, "ip", strings.Fields(args)...)
	}
	n.Must(os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644))
	tools = "/run/tools"
	n.Must(os.Mkdir(tools, 0o755))
	for _, name := range []string{"iptables", "ip6tables"} {
		path, err := exec.LookPath(name + "-" + string(n.Programs.With))
		n.Must(err)
		n.Must(os.Symlink(path, filepath.Join(tools, name)))
	}
	return tools
}

// chainsOf returns the chains that belong to one pod only.
func chainsOf(n *nodetest.Node, p pod) []string {
	n.Helper()
	set := n.Save()[rules.IPv4][rules.Nat]
	var names []string
	for _, c := range set.Chains {
		for _, r := range c.Rules {
			if strings.Contains(r.Spec, p.name) && strings.HasPrefix(r.Target, "CNI-") && r.Target != "CNI-HOSTPORT-DNAT" {
				names = append(names, r.Target)
			}
		}
	}
	return names
}

// TestHostPortsOfTheRealPlugins: bridge with ipMasq and portmap write their rules
// once. Host ports must answer again after every flush. If a pod is removed
// between flush and replay, its port must stay closed.
func TestHostPortsOfTheRealPlugins(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T) // the plugins mount and set sysctls
		nstest.NeedProgram(n.T, "ip", plugins+"/bridge", plugins+"/portmap", plugins+"/host-local")
		tools := network(n)
		first, second := add(n, tools, "pod-first", 8080), add(n, tools, "pod-second", 8081)
		answers(n, "before anything", 8080, first.name)
		answers(n, "before anything", 8081, second.name)
		chains := chainsOf(n, second)
		if len(chains) != 2 {
			n.Fatalf("the second pod has chains %v, want portmap's and ipMasq's", chains)
		}
		p := n.Start()
		before := n.Protected()
		flushes := []func(){func() { flush(n, false) }, func() { flush(n, true) }}
		if n.Programs.With == iptables.NFT {
			flushes = append(flushes, func() { n.Must(n.Programs.FlushRuleset(n.Context())) })
		}
		for i, do := range flushes {
			do()
			n.Until("the rules to be back", func() error { // a flush of several commands has several records
				if diff := cmp.Diff(before, n.Protected()); diff != "" {
					return errors.New(diff)
				}
				return nil
			})
			record := n.Healed(i + 1)
			answers(n, "after flush "+fmt.Sprint(i+1), 8080, first.name)
			answers(n, "after flush "+fmt.Sprint(i+1), 8081, second.name)
			n.Logf("flush %d: %s, noticed after %.1f ms, back after %.1f ms", i+1, record.Kind, 1000*record.NoticedSeconds, 1000*record.AbsentSeconds)
		}

		n.Want(0, "pause", "--for=1m")
		flush(n, false)
		if got := dial(n, 8080); got != "" {
			n.Errorf("%s answers although everything is flushed", got)
		}
		remove(n, tools, second)
		n.Want(0, "resume")
		n.Healed(len(flushes) + 1)
		answers(n, "after a pod was removed during the outage", 8080, first.name)
		answers(n, "after a pod was removed during the outage", 8081, "")
		saved, err := n.Programs.Save(n.Context(), rules.IPv4)
		n.Must(err)
		for _, name := range chains {
			if strings.Contains(saved, name) {
				n.Errorf("%s of the removed pod is back:\n%s", name, saved)
			}
		}
		// Another pod gets its port, and must be reachable there.
		third := add(n, tools, "pod-third", 8081)
		answers(n, "after the port went to another pod", 8081, third.name)
		n.Learned()
		flush(n, true)
		n.Healed(len(flushes) + 2)
		answers(n, "at the end", 8080, first.name)
		answers(n, "at the end", 8081, third.name)

		// A pod that is added during an outage finds the chain of all host ports
		// empty, and must not shut other pods out. A pod that is removed then
		// must stay removed.
		for i, do := range []func(){func() { flush(n, false) }, func() { flush(n, true) }} {
			n.Want(0, "pause", "--for=1m")
			do()
			late := add(n, tools, fmt.Sprintf("pod-late%d", i), 8090+i)
			if i == 0 {
				remove(n, tools, third)
			}
			n.Want(0, "resume")
			n.Healed(len(flushes) + 3 + i)
			answers(n, "after a pod was added during the outage", 8080, first.name)
			answers(n, "after a pod was added during the outage", 8090, "pod-late0")
			answers(n, "after a pod was added during the outage", 8090+i, late.name)
			answers(n, "after a pod was removed during the outage", 8081, "")
			n.Learned()
		}
		p.Stop()
	})
}
