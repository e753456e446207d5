package main

import (
	"flag"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the drawing of docs/architecture.md")

const (
	document = "../../docs/architecture.md"
	begins   = "<!-- drawing: go test ./hack/importcheck -update -->\n```text\n"
	ends     = "```\n"
)

// house returns the packages from go list.
func house(t *testing.T) []Package {
	t.Helper()
	list := exec.Command("go", "list", "-json=ImportPath,Imports", "./...")
	list.Dir = "../.."
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages, err := read(strings.NewReader(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	return packages
}

func readDocument(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestTheDrawingIsTheHouse compares the drawing of docs/architecture.md with the imports.
func TestTheDrawingIsTheHouse(t *testing.T) {
	text := readDocument(t)
	before, rest, found := strings.Cut(text, begins)
	drawn, after, closed := strings.Cut(rest, ends)
	if !found || !closed {
		t.Fatalf("%s has no drawing between %q and %q", document, begins, ends)
	}
	is := draw(house(t))
	if *update {
		if err := os.WriteFile(document, []byte(before+begins+is+ends+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(drawn, is); diff != "" {
		t.Errorf("the drawing is not the house; -update draws it (-drawn +is):\n%s", diff)
	}
	for line := range strings.Lines(is) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 100 {
			t.Errorf("a line of the drawing has %d columns", n)
		}
	}
}

// TestEveryRoomIsInTheTable: the table of docs/architecture.md has a line for each room with a
// package, in their order, and no other lines.
func TestEveryRoomIsInTheTable(t *testing.T) {
	var listed, built []string
	house := house(t)
	_, table, _ := strings.Cut(readDocument(t), "| package | purpose |\n|---|---|\n")
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "| `") {
			break
		}
		name, _, _ := strings.Cut(line[3:], "`")
		listed = append(listed, name)
	}
	for i, name := range rooms {
		if slices.ContainsFunc(house, func(p Package) bool { return room(strings.TrimPrefix(p.ImportPath, module)) == i }) {
			built = append(built, name)
		}
	}
	if diff := cmp.Diff(built, listed); diff != "" {
		t.Errorf("the table of packages (-built +listed):\n%s", diff)
	}
}

func TestDraw(t *testing.T) {
	got := draw([]Package{
		{ImportPath: module + "cmd/canaryd", Imports: []string{"fmt", module + "internal/daemon", module + "pkg/rules"}},
		{ImportPath: module + "internal/daemon", Imports: []string{module + "pkg/rules"}},
		{ImportPath: module + "internal/daemon/inner", Imports: []string{module + "pkg/nft"}},
		{ImportPath: module + "internal/testkit/nstest", Imports: []string{module + "pkg/tableid"}},
		{ImportPath: module + "pkg/nft"},
		{ImportPath: module + "pkg/rules"},
	})
	want := "" +
		"cmd            ┐\n" +
		"daemon         ● ┐\n" +
		"pkg/nft        · ● ┐\n" +
		"pkg/rules      ● ● · ┐\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the drawing (-want +got):\n%s", diff)
	}
}
