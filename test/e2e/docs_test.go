package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

func document(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var commandNames = []string{"run", "check", "restore", "render", "status", "health", "dismiss", "drill", "baseline", "pause", "resume", "detect", "cleanup", "completion", "version"}

// TestReadmeNames: the README names every command.
func TestReadmeNames(t *testing.T) {
	t.Parallel()
	readme := document(t, "README.md")
	for _, name := range commandNames {
		if !strings.Contains(readme, "`canaryd "+name+"`") {
			t.Errorf("README does not name canaryd %s", name)
		}
	}
}

// TestReadmeCommands runs the commands that the README names. It compares the
// README's log lines and status with those of a real flush.
func TestReadmeCommands(t *testing.T) {
	readme := document(t, "README.md")
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start("--max-stored-age=10m", "--mode=heal")
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Healed(1)
		n.Until("the log", func() error {
			if !strings.Contains(d.Log(), "The rules are back") {
				return os.ErrNotExist
			}
			return nil
		})
		log := d.Log()
		lines := regexp.MustCompile(`(?m)^    ("[A-Z].*)$`).FindAllStringSubmatch(readme, -1)
		if len(lines) == 0 {
			n.Error("README shows no log line")
		}
		for _, line := range lines {
			if !slices.Contains(shapes(log), shape(line[1])) {
				n.Errorf("README shows a line of the log that is now another:\n%s\n%s", line[1], log)
			}
		}
		table, _ := n.Want(0, "status")
		for _, heading := range regexp.MustCompile(`(?m)^    (F[A-Z]+  .*)$`).FindAllStringSubmatch(readme, -1) {
			if !strings.Contains(squeeze(table), squeeze(heading[1])) {
				n.Errorf("README shows the heading %q, status prints:\n%s", heading[1], table)
			}
		}

		id := n.Status().Generation.ID
		n.Until("the generation to be on disk", func() error {
			if id = n.Status().Generation.ID; !slices.Contains(n.Stored(), id) {
				return fmt.Errorf("%s is not among %q", id, n.Stored())
			}
			return nil
		})
		var words [][]string
		for _, c := range regexp.MustCompile("(?:`|\\$ )canaryd ([^`\n]+)").FindAllStringSubmatch(readme, -1) {
			words = append(words, strings.Fields(strings.ReplaceAll(c[1], "ID", id)))
		}
		slices.SortStableFunc(words, func(a, b []string) int { // cleanup is the last
			return strings.Compare(map[bool]string{true: "1"}[a[0] == "cleanup"], map[bool]string{true: "1"}[b[0] == "cleanup"])
		})
		ran := map[string]bool{}
		for _, w := range words {
			switch {
			case w[0] == "run":
			case slices.Contains(w, "--watch"): // it does not end; TestDocumentsCommands runs it
			case w[0] == "COMMAND":
				for _, name := range commandNames {
					n.Want(0, name, w[1:]...)
				}
			default:
				n.Want(0, w[0], w[1:]...)
				ran[w[0]] = true
			}
		}
		if len(ran) != len(commandNames)-1 {
			n.Errorf("README names %d commands, want all but run: %v", len(ran), ran)
		}
		d.Stop()
	})
}

// shape returns a log line's message and the names of its values.
func shape(line string) string {
	if i := strings.Index(line, `"`); i > 0 {
		line = line[i:] // removes klog's own heading
	}
	message, values, _ := strings.Cut(strings.TrimPrefix(line, `"`), `"`)
	return message + ":" + strings.Join(regexp.MustCompile(` [a-zA-Z]+=`).FindAllString(quoted.ReplaceAllString(values, ""), -1), "")
}

var quoted = regexp.MustCompile(`"[^"]*"`)

func shapes(log string) []string {
	var all []string
	for line := range strings.Lines(log) {
		all = append(all, shape(line))
	}
	return all
}

func squeeze(text string) string { return regexp.MustCompile(` +`).ReplaceAllString(text, " ") }

// TestDependencies: docs/release.md must list exactly the direct dependencies of
// go.mod.
func TestDependencies(t *testing.T) {
	t.Parallel()
	modules := []string{"go.mod", "hack/tools/go.mod", "hack/release/go.mod", "test/kubernetes/go.mod", "test/kubeproxy/program/go.mod", "test/owners/program/go.mod"}
	for _, file := range modules {
		var want, got []string
		edit := exec.Command("go", "mod", "edit", "-json", "../../"+file)
		out, err := edit.Output()
		if err != nil {
			t.Fatal(err)
		}
		var mod struct {
			Require []struct {
				Path     string
				Indirect bool
			}
			Tool []struct{ Path string }
		}
		if err := json.Unmarshal(out, &mod); err != nil {
			t.Fatal(err)
		}
		for _, r := range mod.Require {
			// A tool's module is marked indirect, because nothing imports it.
			tool := slices.ContainsFunc(mod.Tool, func(t struct{ Path string }) bool { return strings.HasPrefix(t.Path, r.Path+"/") || t.Path == r.Path })
			if !r.Indirect || tool {
				want = append(want, r.Path)
			}
		}
		for _, section := range strings.Split(document(t, "docs/release.md"), "\n## ") {
			// A section is about canaryd's module if it names no other.
			title, about := strings.SplitN(section, "\n", 2)[0], modules[0]
			for _, other := range modules[1:] {
				if strings.Contains(title, other) {
					about = other
				}
			}
			if about != file {
				continue
			}
			for _, row := range regexp.MustCompile(`(?m)^\| ([a-z][a-z0-9.]*\.[a-z]+/\S+) \|`).FindAllStringSubmatch(section, -1) {
				got = append(got, row[1])
			}
		}
		slices.Sort(want)
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("docs/release.md lists other modules than %s (-go.mod +docs):\n%s", file, diff)
		}
	}
}
