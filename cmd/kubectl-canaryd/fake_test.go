package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// fleetFolder names, in the environment of the fake kubectl, the folder with the cluster's answers.
const fleetFolder = "CANARYD_TEST_FLEET"

// TestMain acts as kubectl if this program runs under that name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "kubectl" {
		os.Exit(fakeKubectl(os.Getenv(fleetFolder), os.Args[1:]))
	}
	os.Exit(m.Run())
}

// fakeKubectl answers like kubectl for a cluster whose answers are files. There are lists of
// the API server, a page each, and for each pod a folder with the output of each command.
func fakeKubectl(dir string, args []string) int {
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	fmt.Fprintf(log, "%q\n", args)
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		return strings.HasPrefix(a, "--context=") || strings.HasPrefix(a, "--as=") || strings.HasPrefix(a, "--as-group=") || strings.HasPrefix(a, "--kubeconfig=")
	})
	switch {
	case args[0] == "get" && args[1] == "--raw":
		at, err := url.Parse(args[2])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		query := at.Query()
		return fakeAnswer(filepath.Join(dir, "lists", filepath.Base(at.Path)+url.QueryEscape(query.Get("labelSelector"))+query.Get("continue")))
	case args[0] == "version":
		fmt.Println(`{"clientVersion":{"gitVersion":"v1.36.3","platform":"linux/amd64"},"serverVersion":{"gitVersion":"v1.36.3"}}`)
		return 0
	case args[0] == "exec" && args[1] == "--namespace=kube-system" && args[2] == "--container=canaryd" && args[4] == "--" && args[5] == "canaryd":
		return fakeAnswer(filepath.Join(dir, args[3], args[6]))
	case args[0] == "logs":
		name := "logs"
		if slices.Contains(args, "--previous") {
			name = "previous"
		}
		return fakeAnswer(filepath.Join(dir, args[len(args)-1], name))
	}
	fmt.Fprintf(os.Stderr, "error: unknown command %q\n", args)
	return 1
}

// fakeAnswer copies a file to standard output. NAME.code is the exit code, NAME.err the error
// stream. A link to "hangs" or "endless" makes it hang, or write without end.
func fakeAnswer(path string) int {
	switch link, _ := os.Readlink(path); link {
	case "hangs":
		forEver := make(chan os.Signal, 1)
		signal.Notify(forEver, syscall.SIGUSR1)
		<-forEver
	case "endless":
		out := bufio.NewWriter(os.Stdout)
		for {
			if _, err := out.WriteString(`{"flushes":[`); err != nil {
				return 1
			}
		}
	}
	text, err := os.ReadFile(path)
	said, _ := os.ReadFile(path + ".err")
	if err != nil && len(said) == 0 {
		said = []byte("Error from server (NotFound): not found\n")
	}
	_, _ = os.Stdout.Write(text)
	_, _ = os.Stderr.Write(said)
	number, _ := os.ReadFile(path + ".code")
	code, _ := strconv.Atoi(string(number))
	if err != nil && code == 0 {
		code = 1
	}
	return code
}

// A cluster holds the answers of a fake kubectl.
type cluster struct {
	*testing.T
	dir  string
	pods []map[string]any
}

// noon is the present of all tests.
var noon = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{T: t, dir: t.TempDir()}
	program, err := os.Executable()
	c.must(err)
	c.must(os.MkdirAll(filepath.Join(c.dir, "bin"), 0o755))
	c.must(os.MkdirAll(filepath.Join(c.dir, "lists"), 0o755))
	c.must(os.Symlink(program, filepath.Join(c.dir, "bin", "kubectl")))
	t.Setenv("PATH", filepath.Join(c.dir, "bin"))
	t.Setenv(fleetFolder, c.dir)
	t.Setenv("USER", "alice")
	t.Setenv("SUDO_USER", "")
	return c
}

func (c *cluster) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

// write writes a pod's answer to a command.
func (c *cluster) write(pod, command string, code int, text, said string) {
	c.Helper()
	path := filepath.Join(c.dir, pod, command)
	c.must(os.MkdirAll(filepath.Dir(path), 0o755))
	c.must(os.WriteFile(path, []byte(text), 0o600))
	if said != "" {
		c.must(os.WriteFile(path+".err", []byte(said), 0o600))
	}
	if code != 0 {
		c.must(os.WriteFile(path+".code", []byte(strconv.Itoa(code)), 0o600))
	}
}

// odd makes a command of a pod hang, or write without end.
func (c *cluster) odd(pod, command, how string) {
	c.Helper()
	path := filepath.Join(c.dir, pod, command)
	c.must(os.MkdirAll(filepath.Dir(path), 0o755))
	_ = os.Remove(path) // whether or not there is an answer already
	c.must(os.Symlink(how, path))
}

// running is the state of a container.
var running = map[string]any{"running": map[string]any{}}

// pod adds a pod on a node, and returns its name.
func (c *cluster) pod(node string, state map[string]any) string {
	name := fmt.Sprintf("canaryd-%04d", len(c.pods))
	c.pods = append(c.pods, map[string]any{
		"metadata": map[string]any{"name": name},
		"spec":     map[string]any{"nodeName": node},
		"status": map[string]any{"phase": "Running", "containerStatuses": []any{
			map[string]any{"name": "canaryd", "image": "registry.example/canaryd:0.1.0", "restartCount": 0, "state": state},
		}},
	})
	return name
}

// node adds a node that answers with a status, and returns its pod.
func (c *cluster) node(name string, s api.Status) string {
	c.Helper()
	pod := c.pod(name, running)
	c.status(pod, s)
	return pod
}

func (c *cluster) status(pod string, s api.Status) {
	c.Helper()
	h := s.Health()
	s.Healthy, s.Headline = h.Healthy(), h.String()
	text, err := json.Marshal(s)
	c.must(err)
	if s.Healthy {
		c.write(pod, "status", 0, string(text), "")
	} else {
		c.write(pod, "status", 1, string(text), "command terminated with exit code 1\n")
	}
}

const ownPods = "app.kubernetes.io%2Fpart-of%3Dcanaryd"

// list writes a list of the API server, in pages.
func (c *cluster) list(name, kind string, items []map[string]any, size int) {
	c.Helper()
	page, next := 0, ""
	for {
		here := items[:min(size, len(items))]
		items = items[len(here):]
		metadata := map[string]any{}
		if len(items) > 0 {
			metadata["continue"] = fmt.Sprintf("page%d", page+1)
		}
		text, err := json.Marshal(map[string]any{"kind": kind, "metadata": metadata, "items": append([]map[string]any{}, here...)})
		c.must(err)
		c.must(os.WriteFile(filepath.Join(c.dir, "lists", name+next), text, 0o600))
		if len(items) == 0 {
			return
		}
		page++
		next = fmt.Sprintf("page%d", page)
	}
}

// run runs a command line against the cluster. desired is how many pods there should be.
func (c *cluster) run(desired int, input string, args ...string) (code int, out, said string) {
	c.Helper()
	c.list("pods"+ownPods, "PodList", c.pods, 200)
	c.list("daemonsets"+ownPods, "DaemonSetList", []map[string]any{{"status": map[string]any{"desiredNumberScheduled": desired}}}, 500)
	var stdout, stderr bytes.Buffer
	to := streams{out: &stdout, err: &stderr, now: func() time.Time { return noon }}
	if input != "" {
		to.in = strings.NewReader(input)
	}
	// A busy machine is slow, so only tests about the limit set one.
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--timeout") }) && len(args) > 0 {
		args = append(args, "--timeout="+testkit.Left(c.T).String())
	}
	code = run(context.Background(), args, to)
	return code, stdout.String(), stderr.String()
}

// calls returns kubectl's command lines.
func (c *cluster) calls() []string {
	c.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, "log"))
	c.must(err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// healthy is the status of a healthy node with so many rules.
func healthy(guarded int) api.Status {
	intact := api.Verdicts{rules.Mangle: canary.Intact, rules.Nat: canary.Intact, rules.Filter: canary.Intact}
	return api.Status{
		Mode: api.Heal, Backend: api.Backend{Name: iptables.NFT, Version: "1.8.11"},
		Families:   map[rules.Family]api.Verdicts{rules.IPv4: intact},
		Generation: api.Generation{ID: "af31f3a40aee", Source: "snapshot", Rules: guarded, Chains: 12},
	}
}

// lost is the status of a node whose nat table is empty.
func lost(guarded int) api.Status {
	s := healthy(guarded)
	s.Families = map[rules.Family]api.Verdicts{rules.IPv4: {rules.Mangle: canary.Intact, rules.Nat: canary.Emptied, rules.Filter: canary.Intact}}
	return s
}

// flushOf is the record of a flush by a program, that long before noon.
func flushOf(id, comm, unit string, ago time.Duration) api.Flush {
	by := api.Culprit{PID: 4242, Comm: comm, Command: comm + " flush --secret=hunter2", Unit: unit}
	return api.Flush{
		ID: id, Time: noon.Add(-ago), Kind: canary.Emptied, Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
		Culprit: by, Culprits: []api.Culprit{by},
		Lost: api.Lost{Rules: 174, Chains: 60, Jumps: 8}, NoticedSeconds: 0.002, AbsentSeconds: 0.047, Outcome: reload.Proved, Attempts: 1,
		Detail: "-A KUBE-SVC -d 10.96.0.1/32",
	}
}
