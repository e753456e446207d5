package owners

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// results is the folder of libcni's files on a node of these tests.
const results = "/run/cni-results"

// keep writes the file that libcni keeps after an ADD: see
// internal/cniresults/testdata.
func keep(n *nodetest.Node, p pod) {
	n.Helper()
	text, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": p.name, "config": []byte(`{"cniVersion":"0.4.0","name":"cbr0"}`), "ifName": "eth0", "networkName": "cbr0",
		"cniArgs":        [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", "of-" + p.name}},
		"capabilityArgs": map[string]any{"portMappings": []any{map[string]any{"HostPort": p.hostPort, "ContainerPort": 80, "Protocol": "TCP", "HostIP": ""}}},
		"result":         p.result,
	})
	n.Must(err)
	n.Must(os.MkdirAll(results, 0o700))
	n.Must(os.WriteFile(keptAt(p), text, 0o600))
}

func keptAt(p pod) string { return filepath.Join(results, "cbr0-"+p.name+"-eth0") }

// tryDel runs a plugin's DEL, which may fail, for example because a chain of its
// own is missing.
func tryDel(n *nodetest.Node, tools, plugin string, p pod) error {
	n.Helper()
	cmd := exec.CommandContext(n.Context(), filepath.Join(plugins, plugin))
	config := map[string]any{
		"cniVersion": "0.4.0", "name": "cbr0", "type": plugin, "bridge": "cni0", "isGateway": true, "ipMasq": true,
		"ipam": map[string]any{"type": "host-local", "dataDir": "/run/cni-ipam", "subnet": "10.88.0.0/24"},
	}
	if plugin == "portmap" {
		config["prevResult"] = p.result
		config["runtimeConfig"] = map[string]any{"portMappings": []any{map[string]any{"hostPort": p.hostPort, "containerPort": 80, "protocol": "tcp"}}}
	}
	input, err := json.Marshal(config)
	n.Must(err)
	cmd.Env = []string{
		"PATH=" + tools + ":/usr/sbin:/sbin:/usr/bin:/bin", "CNI_COMMAND=DEL", "CNI_CONTAINERID=" + p.name,
		"CNI_NETNS=/run/netns/" + p.name, "CNI_IFNAME=eth0", "CNI_PATH=" + plugins,
	}
	cmd.Stdin = strings.NewReader(string(input))
	if out, err := cmd.Output(); err != nil {
		return fmt.Errorf("%s DEL: %w: %s", plugin, err, out)
	}
	return nil
}

// TestPodsOfTheRealPluginsThatAreGone: a flush deletes chains too, so a pod's DEL
// finds nothing. If the pod's file is deleted before the replay, its host port
// must stay closed. If the runtime repeats a failed DEL and deletes the file
// after the replay, canaryd removes the rules that the second DEL leaves.
func TestPodsOfTheRealPluginsThatAreGone(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		nstest.NeedProgram(n.T, "ip", plugins+"/bridge", plugins+"/portmap", plugins+"/host-local")
		tools := network(n)
		var pods []pod
		for i, name := range []string{"pod-stays", "pod-early", "pod-late"} {
			p := add(n, tools, name, 8080+i)
			keep(n, p)
			pods = append(pods, p)
		}
		stays, early, late := pods[0], pods[1], pods[2]
		p := n.Start("--cni-results=" + results)
		linesOf := func(p pod) []string {
			saved, err := n.Programs.Save(n.Context(), rules.IPv4)
			n.Must(err)
			var lines []string
			for line := range strings.Lines(saved) {
				if strings.Contains(line, p.name) || strings.Contains(line, ":"+fmt.Sprint(p.hostPort)) {
					lines = append(lines, line)
				}
			}
			return lines
		}

		n.Want(0, "pause", "--for=1m")
		flush(n, true)
		n.Must(tryDel(n, tools, "portmap", early))
		_ = tryDel(n, tools, "bridge", early) // fails: its chain is missing
		n.Must(os.Remove(keptAt(early)))
		n.Must(tryDel(n, tools, "portmap", late))
		if err := tryDel(n, tools, "bridge", late); err == nil {
			n.Log("bridge's DEL does not mind that its chain is missing")
		}
		n.Want(0, "resume")
		n.Healed(1)
		answers(n, "after the replay", stays.hostPort, stays.name)
		answers(n, "after the replay", early.hostPort, "")
		if lines := linesOf(early); len(lines) > 0 {
			n.Errorf("of the pod that was gone came back:\n%s", strings.Join(lines, ""))
		}
		if len(linesOf(late)) == 0 {
			n.Error("of the pod whose DEL failed nothing is back")
		}
		text, _ := n.Want(0, "status", "--flush", "1")
		for _, line := range []string{"of-pod-early (8081/tcp), which is gone", "of-pod-late (8082/tcp)", "of-pod-stays (8080/tcp)"} {
			if !strings.Contains(text, "host ports of pod default/"+line+"\n") {
				n.Errorf("status --flush does not name %s:\n%s", line, text)
			}
		}

		n.Must(tryDel(n, tools, "portmap", late))
		_ = tryDel(n, tools, "bridge", late)
		n.Must(os.Remove(keptAt(late)))
		n.Until("the rules that came back to be taken away", func() error {
			if lines := linesOf(late); len(lines) > 0 {
				return fmt.Errorf("it stands:\n%s", strings.Join(lines, ""))
			}
			return nil
		})
		answers(n, "in the end", stays.hostPort, stays.name)
		n.Until("health", nodetest.Ready)
		p.Stop()
	})
}

// TestRulesOfPodsThatAnAgentDeletes: another agent deletes rules of host ports by
// name, some with their chains, and pauses. The rules of living pods must come
// back, and their ports answer. The DEL of the real plugins stays in effect.
func TestRulesOfPodsThatAnAgentDeletes(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedRoot(n.T)
		nstest.NeedProgram(n.T, "ip", plugins+"/bridge", plugins+"/portmap", plugins+"/host-local")
		tools := network(n)
		var pods []pod
		for i, name := range []string{"pod-a", "pod-b", "pod-c", "pod-ends"} {
			p := add(n, tools, name, 8080+i)
			keep(n, p)
			pods = append(pods, p)
		}
		const grace = 2 * time.Second
		p := n.Start("--cni-results="+results, "--jump-grace="+grace.String())
		n.Renewed()
		ends := pods[3]
		for i, pause := range []time.Duration{0, 500 * time.Millisecond, 2500 * time.Millisecond} {
			for j, p := range pods[:3] {
				var chain string
				for _, line := range strings.Split(run(n, rules.IPv4, rules.Nat, "-S", "CNI-HOSTPORT-DNAT"), "\n") {
					if strings.Contains(line, p.name) {
						words, err := rules.Split(strings.TrimPrefix(line, "-A "))
						n.Must(err)
						chain = words[len(words)-1]
						run(n, rules.IPv4, rules.Nat, append([]string{"-D"}, words...)...)
						testkit.Pass(n.T, pause, "the agent's pause between two commands")
					}
				}
				if chain != "" && pause > 0 && (i+j)%2 == 0 { // otherwise an unknown process has 3 minutes
					run(n, rules.IPv4, rules.Nat, "-F", chain)
					testkit.Pass(n.T, pause/5, "the agent's pause between two commands")
					_ = exec.CommandContext(n.Context(), program(n, rules.IPv4, ""), "-w", "5", "-t", "nat", "-X", chain).Run() // it may be back
				}
			}
			if i == 1 { // in the middle of it a pod ends
				remove(n, tools, ends)
				n.Must(os.Remove(keptAt(ends)))
			}
			n.Until("the host ports to answer again", func() error {
				for _, p := range pods[:3] {
					if got := dial(n, p.hostPort); got != p.name {
						return fmt.Errorf("%q answers for %s", got, p.name)
					}
				}
				return nodetest.Ready()
			})
		}
		answers(n, "in the end", ends.hostPort, "")
		if saved, err := n.Programs.Save(n.Context(), rules.IPv4); err != nil || strings.Contains(saved, ends.name) {
			n.Errorf("of the pod that ended is left (%v):\n%s", err, saved)
		}
		if strings.Count(run(n, rules.IPv4, rules.Nat, "-S", "CNI-HOSTPORT-DNAT"), "-A ") != 3 {
			n.Errorf("rules are missing, or stand twice:\n%s", run(n, rules.IPv4, rules.Nat, "-S", "CNI-HOSTPORT-DNAT"))
		}
		p.Stop()
	})
}
