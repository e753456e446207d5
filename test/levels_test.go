package test

import (
	"go/ast"
	"go/constant"
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

// TestWhatIsLeftIsRun: each test that make test leaves to another level is run by that level.
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

	left := map[string]map[string][]string{} // by level, then package: its tests
	for folder := range folders(t) {
		for test, level := range leaving(t, "../"+folder) {
			if level == "make test-programs" && slices.Contains(whole, "./"+folder) ||
				slices.Contains([]string{"test/versions", "test/flushers", "test/kernels"}, folder) {
				continue // all of it is a level's
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

// TestRacedTestsExist: each test of test/e2e that make race names is one, and so is each test of
// pkg/iptables that it leaves out.
func TestRacedTestsExist(t *testing.T) {
	script := text(t, "../hack/test.sh")
	_, list, _ := strings.Cut(script, "<<-END\n")
	list, _, _ = strings.Cut(list, "END\n")
	for _, m := range regexp.MustCompile(`-skip='\^(\w+)\$'`).FindAllStringSubmatch(script, -1) {
		if !slices.Contains(parsed(t, "../pkg/iptables").Tests(), m[1]) {
			t.Errorf("hack/test.sh leaves out %s, and pkg/iptables has no such test", m[1])
		}
	}
	named := regexp.MustCompile(`\w+`).FindAllString(list, -1)
	if len(named) == 0 {
		t.Fatal("hack/test.sh names no tests")
	}
	all := parsed(t, "e2e").Tests()
	for _, name := range named {
		if !slices.Contains(all, "Test"+name) {
			t.Errorf("hack/test.sh names Test%s, and test/e2e has no such test", name)
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

// leaving returns the tests of a folder that need something of nstest.Elsewhere, by themselves or
// by a function of the folder that they call, and the level that has it.
func leaving(t *testing.T, folder string) map[string]string {
	t.Helper()
	all := parsed(t, folder)
	constants := stringConstants(all.Files)
	return all.Reaching(func(call *ast.CallExpr) string {
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

// begins returns how the value of an expression begins, as far as it is known.
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
