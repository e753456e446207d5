// Importcheck reports imports that break the rules of the house: imports run one way, two
// packages execute programs, one package uses Prometheus.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

const module = "github.com/canaryd/canaryd/"

// rooms lists the house from the roof to the ground. A package imports only rooms that are
// later in this list.
var rooms = []string{
	"cmd", "internal/web", "internal/control", "internal/sdnotify", "internal/daemon", "internal/drill", "internal/accepted", "internal/quarantine", "internal/pods", "internal/culprit", "internal/nativestore", "internal/onrequest", "internal/baseline", "internal/flushes", "internal/copies", "internal/pace", "internal/here", "internal/metrics", "internal/serve", "internal/api",
	"pkg/reload", "pkg/standby", "pkg/native", "pkg/canary", "pkg/iptables", "pkg/watch", "pkg/conntrack", "pkg/nft",
	"internal/journal", "internal/cniresults", "internal/cgroup", "internal/source",
	"pkg/rules/kube", "pkg/protect", "pkg/rules", "internal/private", "internal/terminal", "internal/severity", "pkg/ruleset", "pkg/owners", "pkg/nat", "pkg/tableid", "internal/sorting",
}

// faces are the rooms in which the daemon meets the world.
var faces = []string{"internal/web", "internal/control", "internal/serve", "internal/metrics", "internal/sdnotify", "internal/api"}

// subjects are the rooms in which the loop's subjects keep their state. They know the loop by
// the values that it passes to them, and the faces by the values of internal/api.
var subjects = []string{
	"internal/drill", "internal/accepted", "internal/quarantine", "internal/pods", "internal/culprit", "internal/nativestore", "internal/onrequest", "internal/baseline",
	"internal/flushes", "internal/copies", "internal/pace", "internal/here",
}

// helpers are packages for tests, by purpose. A package that only tests may import is no room.
var helpers = []string{
	"internal/testkit", "pkg/iptables/iptablestest", "pkg/nft/nfttest",
}

// A Package is an entry in the output of "go list -json".
type Package struct {
	ImportPath string
	Imports    []string // without those of test files
}

func main() {
	os.Exit(run())
}

func run() int {
	list := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, "importcheck: go list:", err)
		return 2
	}
	packages, err := read(strings.NewReader(string(out)))
	if err != nil {
		fmt.Fprintln(os.Stderr, "importcheck:", err)
		return 2
	}
	broken := check(packages)
	for _, line := range broken {
		fmt.Println(line)
	}
	if len(broken) > 0 {
		return 1
	}
	return 0
}

func read(r io.Reader) ([]Package, error) {
	var all []Package
	for dec := json.NewDecoder(r); ; {
		var p Package
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("reading go list's output: %w", err)
		}
		all = append(all, p)
	}
}

// check returns a line for every import that breaks a rule, and for every package without a
// known rule.
func check(packages []Package) []string {
	var broken []string
	for _, p := range packages {
		name := strings.TrimPrefix(p.ImportPath, module)
		if room(name) < 0 && !isHelper(name) && (within(name, "pkg") || within(name, "internal")) {
			broken = append(broken, name+" is no room of the house: give it a place in hack/importcheck")
		}
		for _, imported := range p.Imports {
			for _, reason := range judge(name, imported) {
				broken = append(broken, fmt.Sprintf("%s imports %s: %s", name, imported, reason))
			}
		}
	}
	return broken
}

// judge returns the rules that are broken when the package name imports that.
func judge(name, imported string) []string {
	ours, isOurs := strings.CutPrefix(imported, module)
	here := room(name)
	if within(name, "internal/testkit") && within(ours, "internal/testkit/browser") && name != ours {
		return []string{"the tests of every package would link the browser's driver"}
	}
	if here < 0 {
		return nil // hack, test and test helpers are not the house
	}
	var reasons []string
	rule := func(broken bool, reason string) {
		if broken {
			reasons = append(reasons, reason)
		}
	}
	if isOurs {
		there := room(ours)
		rule(there < 0, "test helpers are imported by tests only")
		rule(there >= 0 && there < here, "imports run one way, "+strings.Join(rooms, " -> "))
		values := ours == "internal/api" && slices.Contains(subjects, rooms[here]) || ours == "internal/serve" && rooms[here] == "internal/here"
		rule(there >= 0 && isFace(there) && !isFace(here) && rooms[here] != "cmd" && rooms[here] != "internal/daemon" && !values,
			"a face is imported by cmd, internal/daemon and other faces")
		rule(within(ours, "internal/daemon") && rooms[here] != "cmd" && rooms[here] != "internal/daemon",
			"imports run one way: faces know the daemon by the values of internal/api")
		rule(within(ours, "internal/source") && !slices.Contains([]string{"cmd", "internal/source"}, rooms[here]),
			"declared rules are loaded by cmd, which hands them on as values")
	}
	if ours == "internal/sorting" { // as a package of the standard library
		return reasons
	}
	outside := !isOurs && strings.Contains(strings.Split(imported, "/")[0], ".")
	switch rooms[here] {
	case "pkg/rules":
		rule(outside, "pkg/rules imports the standard library, pkg/nat and pkg/tableid only")
		rule(slices.Contains([]string{"os", "net", "time", "syscall"}, imported) || path.Dir(imported) == "os",
			"pkg/rules does no I/O and reads no clock")
	case "pkg/protect":
		rule(outside || isOurs && ours != "pkg/rules" && ours != "pkg/owners" && ours != "pkg/tableid",
			"pkg/protect names owners' rules: it imports the standard library, pkg/rules, pkg/owners and pkg/tableid only")
	case "pkg/owners":
		rule(outside || isOurs && ours != "pkg/tableid", "pkg/owners is a table: it imports the standard library and pkg/tableid only")
	case "pkg/nat":
		rule(outside || isOurs, "pkg/nat knows no kind of rules: it imports the standard library only")
	case "pkg/nft":
		rule(isOurs && ours != "pkg/tableid", "pkg/nft knows nothing of iptables: of ours it imports pkg/tableid only")
	case "pkg/native":
		rule(isOurs && ours != "pkg/nft" && ours != "pkg/owners" && ours != "pkg/nat" && ours != "pkg/tableid",
			"pkg/native knows tables as raw objects: of ours it imports pkg/nft, pkg/owners, pkg/nat and pkg/tableid only")
	case "pkg/standby":
		rule(isOurs && ours != "pkg/nft" && ours != "pkg/native" && ours != "pkg/tableid",
			"pkg/standby copies raw objects: of ours it imports pkg/nft, pkg/native and pkg/tableid only")
	case "pkg/watch":
		rule(isOurs && !within(ours, "pkg/watch") && ours != "pkg/nft" && ours != "pkg/owners",
			"pkg/watch gives hints and knows no rules: of ours it imports pkg/nft and pkg/owners only")
	case "pkg/tableid":
		rule(outside || isOurs, "pkg/tableid imports the standard library only")
	case "pkg/rules/kube":
		rule(outside && imported != "sigs.k8s.io/yaml",
			"pkg/rules/kube has types of its own for Kubernetes' objects: it imports sigs.k8s.io/yaml and nothing else from outside")
	case "internal/metrics", "internal/web", "cmd":
	default:
		rule(within(imported, "github.com/prometheus"), "only internal/metrics and internal/web see Prometheus")
	}
	rule(imported == "os/exec" && rooms[here] != "pkg/iptables" && name != "cmd/kubectl-canaryd",
		"only pkg/iptables executes programs, and cmd/kubectl-canaryd kubectl")
	return reasons
}

// room returns the place of the package's room in the list, or -1. If rooms are nested, the
// inner one counts.
func room(name string) int {
	if isHelper(name) {
		return -1
	}
	best := -1
	for i, r := range rooms {
		if within(name, r) && (best < 0 || len(r) > len(rooms[best])) {
			best = i
		}
	}
	return best
}

func isFace(room int) bool { return slices.Contains(faces, rooms[room]) }

func isHelper(name string) bool {
	return slices.ContainsFunc(helpers, func(h string) bool { return within(name, h) })
}

func within(name, folder string) bool {
	return name == folder || strings.HasPrefix(name, folder+"/")
}
