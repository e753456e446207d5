//go:build cluster

package cluster

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
)

// operator is a user with exactly the rights that docs/fleet.md lists.
const operator = "operator"

// tryPlugin queries the node with kubectl canaryd, as a user with the documented rights.
func tryPlugin(n *node) {
	n.settled()
	n.wantHealthy()
	document, err := os.ReadFile("../../docs/fleet.md")
	n.must(err)
	const head = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n"
	_, role, _ := strings.Cut(string(document), "```yaml\n"+head)
	role, _, found := strings.Cut(head+role, "```\n")
	if !found {
		n.Fatal("docs/fleet.md has no role")
	}
	n.wantInput(role, "kubectl", "apply", "--server-side", "--validate=strict", "-f", "-")
	n.want("kubectl", "-n", "kube-system", "create", "rolebinding", "canaryd-operator", "--role=canaryd-operator", "--user="+operator)

	started := time.Now()
	var fleet struct {
		Nodes []struct {
			Node, Pod, State, Backend string
			Healthy, Answered         bool
		}
		WithoutPod int
	}
	n.pluginJSON(&fleet, "status")
	n.results.step("kubectl canaryd status", time.Since(started))
	if len(fleet.Nodes) != 1 || fleet.WithoutPod != 0 {
		n.Fatalf("kubectl canaryd status has %+v", fleet)
	}
	if row := fleet.Nodes[0]; row.Node != nodeName || row.Pod != n.pod() || row.State != "healthy" || !row.Healthy || !row.Answered || row.Backend != string(n.backend) {
		n.Errorf("kubectl canaryd status has %+v", row)
	}
	if out, _, err := n.run("", "kubectl", "canaryd", "status", "--as=stranger"); err == nil {
		n.Errorf("kubectl canaryd status of a user without rights says\n%s", out)
	}
	if table := n.want("kubectl", "canaryd", "status", "-l", "kubernetes.io/os=linux"); !strings.Contains(table, "1 node: 1 healthy") {
		n.Errorf("kubectl canaryd status -l says\n%s", table)
	}

	records, _, err := n.records(time.Time{})
	n.must(err)
	var want, got []string
	for _, r := range records {
		want = append(want, r.ID)
	}
	var flushes struct {
		Flushes []struct{ ID, Node string }
	}
	n.pluginJSON(&flushes, "flushes", "--since=24h")
	for _, f := range flushes.Flushes {
		got = append(got, f.ID)
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" || len(want) == 0 {
		n.Errorf("kubectl canaryd flushes (-canaryd status +plugin):\n%s", diff)
	}
	if table := n.want("kubectl", "canaryd", "detect", "--as="+operator); !strings.Contains(table, string(n.backend)) {
		n.Errorf("kubectl canaryd detect says\n%s", table)
	}

	// A yes from a pipe is not a person's.
	_, asked, err := n.run("yes\n", "kubectl", "canaryd", "pause", "--all", "--as="+operator)
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(asked, "1 node: "+nodeName) || !strings.Contains(asked, "nothing was asked of any node") {
		n.Errorf("kubectl canaryd pause without a confirmation ends with %v, and says\n%s", err, asked)
	}
	n.wantHealthy()
	var paused struct {
		Nodes []struct {
			Node   string
			Paused bool
		}
		Unanswered int
	}
	n.pluginJSON(&paused, "pause", "--all", "--yes", "--why=a test")
	if len(paused.Nodes) != 1 || paused.Nodes[0].Node != nodeName || !paused.Nodes[0].Paused || paused.Unanswered != 0 {
		n.Errorf("kubectl canaryd pause has %+v", paused)
	}
	if _, healthy, err := n.status(); err != nil || healthy {
		n.Errorf("after kubectl canaryd pause: healthy %t, %v", healthy, err)
	}
	n.want("kubectl", "canaryd", "resume", nodeName, "--yes", "--as="+operator)
	n.wantHealthy()
	n.wantArchive()
}

// pluginJSON runs the plugin as the operator.
func (n *node) pluginJSON(into any, words ...string) {
	n.Helper()
	out := n.want("kubectl", append(append([]string{"canaryd"}, words...), "-o", "json", "--as="+operator)...)
	n.must(json.Unmarshal([]byte(out), into))
}

// wantArchive wants the files of the node in an archive, and no address in them.
func (n *node) wantArchive() {
	n.Helper()
	path := filepath.Join(n.dir, "sysdump.tar.gz")
	n.want("kubectl", "canaryd", "sysdump", "--file="+path, "--as="+operator)
	file, err := os.Open(path)
	n.must(err)
	defer file.Close()
	zip, err := gzip.NewReader(file)
	n.must(err)
	var names []string
	for archive := tar.NewReader(zip); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		n.must(err)
		text, err := io.ReadAll(archive)
		n.must(err)
		names = append(names, header.Name)
		for _, secret := range []string{nodeIPv4, nodeIPv6, " -j ", "--dport"} {
			if strings.Contains(string(text), secret) {
				n.Errorf("%s in the archive has %q", header.Name, secret)
			}
		}
	}
	for _, name := range []string{"flushes.json", "log.txt", "pod.json", "status.json", "version.json"} {
		if path := fmt.Sprintf("canaryd-sysdump/nodes/%s/%s", nodeName, name); !slices.Contains(names, path) {
			n.Errorf("the archive has no %s: %q", path, names)
		}
	}
}
