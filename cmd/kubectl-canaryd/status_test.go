package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/rules"
)

// waiting is the state of a container that does not start.
var waiting = map[string]any{"waiting": map[string]any{"reason": "CrashLoopBackOff"}}

// troubled adds nodes in all states, and nodes that do not answer.
func troubled(c *cluster) {
	c.node("lost-1", lost(460))
	paused := healthy(460)
	paused.Paused, paused.PausedUntil = true, noon.Add(time.Hour)
	c.node("paused-1", paused)
	stopped := healthy(460)
	stopped.Stopped = true
	c.node("stopped-1", stopped)
	partial := healthy(460)
	partial.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SERVICES", Rule: "-A KUBE-SERVICES -d 10.96.0.1/32 -j X"}}
	c.node("partial-1", partial)
	nothing := healthy(0)
	nothing.NothingProtected = &api.Nothing{}
	c.node("nothing-1", nothing)
	warned := healthy(460)
	warned.StateError = "disk full"
	c.node("warned-1", warned)
	flushed := healthy(460)
	flushed.Flushes = []api.Flush{flushOf("1", "nft", "puppet.service", time.Hour), flushOf("2", "iptables", "", 30*time.Hour)}
	c.node("flushed-1", flushed)

	c.pod("crashing-1", waiting)
	c.write(c.pod("silent-1", running), "status", 2, "", "canaryd: no daemon is running\ncommand terminated with exit code 2\n")
	c.write(c.pod("gone-1", running), "status", 1, "", "Error from server (NotFound): pods \"canaryd-x\" not found\n")
	c.write(c.pod("torn-1", running), "status", 0, `{"healthy":true,"families":{"ipv4":{"mangle":"int`, "")
	c.write(c.pod("liar-1", running), "status", 1, `{"healthy":true,"families":{"ipv4":{"mangle":"intact","nat":"intact","filter":"intact"}},"generation":{"id":"x","rules":1}}`, "")
	c.write(c.pod("newer-1", running), "status", 1, `{"healthy":false,"headline":"NOT healthy: the moon is full","families":{"ipv4":{"mangle":"intact","nat":"intact","filter":"intact"}},"generation":{"id":"x","rules":1}}`, "")
	c.write(c.pod("empty-1", running), "status", 0, `{}`, "")
	c.write(c.pod("hostile-\x1b]0;owned\x07", running), "status", 1, "\x1b[2J", "\x1b]0;all is well\x07 --help\n")
	c.write(c.pod("--token=x", running), "status", 0, strings.Repeat("[", mostObjects+1), "")
	c.write(c.pod("large-1", running), "status", 0, `{"families":{"ipv4":{`+strings.Repeat(`"a":"",`, mostValues+1)+`"a":""}}}`, "")
}

// TestStatusOf500Nodes: the table has a row for each of 500 nodes, the worst first. A node
// without an answer is unknown, and the exit code shows that.
func TestStatusOf500Nodes(t *testing.T) {
	c := newCluster(t)
	troubled(c)
	for i := len(c.pods); i < 500; i++ {
		c.node(fmt.Sprintf("node-%04d", i), healthy(460))
	}
	code, out, said := c.run(501, "", "status")
	if code != exitError {
		t.Errorf("exit code %d, want %d", code, exitError)
	}
	golden.Compare(t, "status.golden", []byte(shorter(out)+"--- stderr\n"+said))
}

// shorter removes the rows of healthy nodes that are all alike.
func shorter(out string) string {
	n := 0
	lines := slices.DeleteFunc(strings.Split(out, "\n"), func(line string) bool {
		same := strings.HasPrefix(line, "node-")
		if same {
			n++
		}
		return same && n > 2
	})
	return strings.Join(lines, "\n")
}

// TestStatusIsJSON: -o json has the rows of the table, in the same order.
func TestStatusIsJSON(t *testing.T) {
	c := newCluster(t)
	troubled(c)
	_, out, _ := c.run(0, "", "status", "-o", "json")
	golden.Compare(t, "status.json.golden", []byte(out))
	var reply statusReply
	if err := json.Unmarshal([]byte(out), &reply); err != nil {
		t.Fatal(err)
	}
	_, table, _ := c.run(0, "", "status")
	var names, rows []string
	for _, n := range reply.Nodes {
		names = append(names, cell(n.Node))
	}
	for _, line := range strings.Split(table, "\n")[1 : len(names)+1] {
		name, _, _ := strings.Cut(line, " ")
		rows = append(rows, name)
	}
	if diff := cmp.Diff(names, rows); diff != "" {
		t.Errorf("(-JSON +table):\n%s", diff)
	}
}

// TestExitCodes: the code is 0 only if all nodes are known to be healthy, and none is missing.
func TestExitCodes(t *testing.T) {
	for _, test := range []struct {
		name    string
		add     func(*cluster)
		desired int
		args    []string
		want    int
	}{
		{"all are healthy", func(*cluster) {}, 2, nil, exitOK},
		{"one is lost", func(c *cluster) { c.node("c", lost(1)) }, 3, nil, exitNo},
		{"one is lost, but not asked", func(c *cluster) { c.node("c", lost(1)) }, 3, []string{"a", "b"}, exitOK},
		{"one does not answer", func(c *cluster) { c.pod("c", waiting) }, 3, nil, exitError},
		{"one is lost, one does not answer", func(c *cluster) { c.node("c", lost(1)); c.pod("d", waiting) }, 4, nil, exitError},
		{"a node has no pod", func(*cluster) {}, 3, nil, exitError},
		{"a node that is named has no pod", func(*cluster) {}, 2, []string{"a", "z"}, exitError},
		{"a node that looks like a flag", func(*cluster) {}, 2, []string{"--", "--context=evil"}, exitError},
		{"no such flag", func(*cluster) {}, 2, []string{"--contekst=x"}, exitError},
		{"a namespace that leads elsewhere", func(*cluster) {}, 2, []string{"-n", "../nodes"}, exitError},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t)
			c.node("a", healthy(1))
			c.node("b", healthy(1))
			test.add(c)
			code, out, said := c.run(test.desired, "", append([]string{"status"}, test.args...)...)
			if code != test.want {
				t.Errorf("exit code %d, want %d\n%s%s", code, test.want, out, said)
			}
		})
	}
}

// TestNodesBySelector: -l selects the nodes with these labels, even nodes without a pod.
func TestNodesBySelector(t *testing.T) {
	c := newCluster(t)
	c.node("a", healthy(1))
	c.node("b", lost(1))
	c.list("nodespool%3Dgpu", "NodeList", []map[string]any{{"metadata": map[string]any{"name": "z"}}, {"metadata": map[string]any{"name": "a"}}}, 1)
	code, out, said := c.run(2, "", "status", "-l", "pool=gpu")
	if code != exitError {
		t.Errorf("exit code %d, want %d", code, exitError)
	}
	golden.Compare(t, "selector.golden", []byte(out+said))
}

// TestPodsOfANode: if a node has several pods, the running one counts. A pod that is not
// scheduled has its node in its affinity.
func TestPodsOfANode(t *testing.T) {
	c := newCluster(t)
	c.pod("a", waiting)
	c.node("a", healthy(1))
	c.pods[1]["metadata"].(map[string]any)["deletionTimestamp"] = "2026-11-27T11:59:00Z"
	c.node("a", healthy(2))
	c.pod("", nil)
	c.pods[3]["spec"] = map[string]any{"affinity": map[string]any{"nodeAffinity": map[string]any{"requiredDuringSchedulingIgnoredDuringExecution": map[string]any{
		"nodeSelectorTerms": []any{map[string]any{"matchFields": []any{map[string]any{"key": "metadata.name", "values": []string{"b"}}}}}}}}}
	c.pods[3]["status"] = map[string]any{"phase": "Pending"}
	c.pod("c", running)
	c.pods[4]["metadata"].(map[string]any)["name"] = "--as=system:admin"
	_, out, _ := c.run(3, "", "status")
	golden.Compare(t, "pods.golden", []byte(out))
}

// TestNoPods: a namespace without a pod of canaryd is an error, and no healthy fleet.
func TestNoPods(t *testing.T) {
	c := newCluster(t)
	code, out, said := c.run(0, "", "status")
	want := "kubectl canaryd: no pod in the namespace kube-system has the labels app.kubernetes.io/part-of=canaryd: name others with -n and --pods\n"
	if diff := cmp.Diff(want, said); diff != "" || code != exitError || out != "" {
		t.Errorf("exit code %d, output %q (-want +got):\n%s", code, out, diff)
	}
}

// TestNoAnswerInTime: a node that hangs or writes without end is unknown, and all kubectls end.
func TestNoAnswerInTime(t *testing.T) {
	c := newCluster(t)
	c.odd(c.pod("hangs", running), "status", "hangs")
	code, out, _ := c.run(1, "", "status", "--timeout=20ms")
	if code != exitError || !strings.Contains(out, "no answer within 20ms") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	c = newCluster(t)
	c.odd(c.pod("endless", running), "status", "endless")
	code, out, _ = c.run(1, "", "status")
	if code != exitError || !strings.Contains(out, "the answer is longer than 8 MiB") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
}

// TestKubectlsFlags: all calls of kubectl have the flags meant for kubectl.
func TestKubectlsFlags(t *testing.T) {
	c := newCluster(t)
	c.node("a", healthy(1))
	code, out, said := c.run(1, "", "status", "--context", "prod", "--as=bob", "--as-group=x", "--as-group=y,z", "--kubeconfig=/k")
	if code != exitOK {
		t.Fatalf("exit code %d\n%s%s", code, out, said)
	}
	flags := `"--context=prod" "--as=bob" "--as-group=x" "--as-group=y,z" "--kubeconfig=/k" `
	list := `?labelSelector=app.kubernetes.io%2Fpart-of%3Dcanaryd`
	want := []string{
		`[` + flags + `"get" "--raw" "/api/v1/namespaces/kube-system/pods` + list + `&limit=500"]`,
		`[` + flags + `"get" "--raw" "/apis/apps/v1/namespaces/kube-system/daemonsets` + list + `"]`,
		`[` + flags + `"exec" "--namespace=kube-system" "--container=canaryd" "canaryd-0000" "--" "canaryd" "status" "-o" "json"]`,
	}
	if diff := cmp.Diff(want, c.calls()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestRanks: every state has its place, and the worst is the first.
func TestRanks(t *testing.T) {
	last := -1
	for _, state := range worstFirst {
		for _, text := range []string{"why", ""} {
			rank := statusRow{State: state, Answered: true, Text: text}.rank()
			if rank <= last {
				t.Errorf("%s %q has the rank %d, after %d", state, text, rank, last)
			}
			last = rank
		}
	}
	if got, want := (statusRow{State: "exploded", Answered: true}).rank(), (statusRow{State: api.StateUnknown, Answered: true}).rank(); got != want {
		t.Errorf("a state that is not known has the rank %d, want %d", got, want)
	}
}
