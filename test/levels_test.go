package test

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/callers"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestWhatIsLeftIsRun: each test that make test leaves to another level runs at that level.
func TestWhatIsLeftIsRun(t *testing.T) {
	makefile, script := text(t, "../Makefile"), text(t, "../hack/test.sh")
	_, script, _ = strings.Cut(script, "\nprograms)\n")
	list := func(name string) string {
		return regexp.MustCompile(name + `=[('](.+)[')]\n`).FindStringSubmatch(script)[1]
	}
	whole := strings.Fields(list("whole"))
	runs := map[string]map[string]*regexp.Regexp{"make test-programs": {}, "make versions": {}}
	for _, folder := range strings.Fields(list("some")) {
		runs["make test-programs"][strings.TrimPrefix(folder, "./")] = regexp.MustCompile(list("named"))
	}
	// A run of some tests of a package.
	some := regexp.MustCompile(`-run[= ]'?([^' ]+)'? \./(\S+)`)
	for _, m := range some.FindAllStringSubmatch(strings.ReplaceAll(makefile, "$$", "$"), -1) {
		if m[2] == "test/e2e" {
			runs["make versions"][m[2]] = regexp.MustCompile(m[1])
		}
	}

	left := map[string]map[string][]string{} // tests by level, then by package
	for folder := range folders(t) {
		for test, level := range leaving(t, "../"+folder) {
			if level == "make test-programs" && slices.Contains(whole, "./"+folder) ||
				slices.Contains([]string{"test/versions", "test/flushers", "test/kernels"}, folder) {
				continue // the level runs the whole package
			}
			if left[level] == nil {
				left[level] = map[string][]string{}
			}
			left[level][folder] = append(left[level][folder], test)
		}
	}
	run := map[string]map[string][]string{}
	for level, packages := range runs {
		run[level] = map[string][]string{}
		for folder, pattern := range packages {
			for _, test := range parsed(t, "../"+folder).Tests() {
				if pattern.MatchString(test) {
					run[level][folder] = append(run[level][folder], test)
				}
			}
		}
	}
	for _, levels := range []map[string]map[string][]string{left, run} {
		for _, packages := range levels {
			for _, names := range packages {
				slices.Sort(names)
			}
		}
	}
	if diff := cmp.Diff(left, run); diff != "" {
		t.Errorf("tests that make test leaves to other levels, and that these run (-left +run):\n%s", diff)
	}
}

// TestRacedTestsExist: each test that make race names or omits is in a package of make race.
// hack/meeting refuses unknown names.
func TestRacedTestsExist(t *testing.T) {
	script := text(t, "../hack/test.sh")
	_, script, _ = strings.Cut(script, "\nrace)\n")
	script, _, _ = strings.Cut(script, "\n\t;;\n")
	_, list, _ := strings.Cut(script, "<<-END\n")
	list, _, _ = strings.Cut(list, "END\n")
	named := regexp.MustCompile(`\w+`).FindAllString(list, -1)
	for _, m := range regexp.MustCompile(`-skip='\^Test\(([\w|]+)\)\$'`).FindAllStringSubmatch(script, -1) {
		named = append(named, strings.Split(m[1], "|")...)
	}
	if len(named) == 0 {
		t.Fatal("hack/test.sh names no tests")
	}
	var all []string
	for _, folder := range []string{"e2e", "interleavings", "../cmd/canaryd", "../cmd/kubectl-canaryd", "../pkg/iptables", "../internal/daemon"} {
		all = append(all, parsed(t, folder).Tests()...)
	}
	for _, name := range named {
		if !slices.Contains(all, "Test"+name) {
			t.Errorf("hack/test.sh names Test%s, and no package of make race has such a test", name)
		}
	}
}

// TestGoroutinesAreRaced: the code or the tests of a package start a goroutine. hack/test.sh
// says at which level the race detector runs on it, or that none does.
func TestGoroutinesAreRaced(t *testing.T) {
	script := text(t, "../hack/test.sh")
	_, lists, _ := strings.Cut(script, "\nelsewhere=(")
	lists, _, _ = strings.Cut(lists, "case ${1:-}")
	_, race, _ := strings.Cut(script, "\nrace)\n")
	race, _, _ = strings.Cut(race, "\n\t;;\n")
	said := regexp.MustCompile(`\./[\w/-]+`).FindAllString(lists+race, -1)
	for folder := range folders(t) {
		if slices.Contains(said, "./"+folder) || folder == "test/kubernetes" || folder == "hack/release" {
			continue // modules of their own
		}
		paths, err := filepath.Glob("../" + folder + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if callers.Starts(n) != "" {
					t.Errorf("%s starts a goroutine, and no list of hack/test.sh has ./%s", path, folder)
				}
				return true
			})
		}
	}
}

func text(t *testing.T, path string) string {
	t.Helper()
	all, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(all)
}

// folders returns the folders with tests of canaryd's module.
func folders(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") && !strings.Contains(path, "testdata/") {
			all[strings.TrimPrefix(filepath.Dir(path), "../")] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func parsed(t *testing.T, folder string) callers.Folder {
	t.Helper()
	all, err := callers.Parse(folder)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// leaving returns the tests of a folder that need a file or program of nstest.Elsewhere,
// directly or through a function of the folder. The value is the level that has it.
func leaving(t *testing.T, folder string) map[string]string {
	t.Helper()
	all := parsed(t, folder)
	constants := stringConstants(all.Files)
	return all.Reaching(func(n ast.Node) string {
		call, is := n.(*ast.CallExpr)
		if !is {
			return ""
		}
		s, is := call.Fun.(*ast.SelectorExpr)
		if !is || s.Sel.Name != "NeedProgram" && s.Sel.Name != "NeedFile" {
			return ""
		}
		for _, arg := range call.Args {
			thing := begins(arg, constants)
			for there, level := range nstest.Elsewhere {
				if thing == there || strings.HasPrefix(thing, there+"/") {
					return level
				}
			}
		}
		return ""
	})
}

func stringConstants(files []*ast.File) map[string]ast.Expr {
	all := map[string]ast.Expr{}
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, is := n.(*ast.ValueSpec); is && len(spec.Values) == len(spec.Names) {
				for i, name := range spec.Names {
					all[name.Name] = spec.Values[i]
				}
			}
			return true
		})
	}
	return all
}

// begins returns the known beginning of an expression's value.
func begins(e ast.Expr, constants map[string]ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if v := constant.MakeFromLiteral(e.Value, e.Kind, 0); v.Kind() == constant.String {
			text, _ := strconv.Unquote(e.Value)
			return text
		}
	case *ast.BinaryExpr:
		return begins(e.X, constants) + begins(e.Y, constants)
	case *ast.Ident:
		if value, known := constants[e.Name]; known {
			return begins(value, constants)
		}
	case *ast.CallExpr: // filepath.Join
		if len(e.Args) > 0 {
			return begins(e.Args[0], constants) + "/"
		}
	}
	return ""
}
