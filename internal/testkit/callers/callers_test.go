package callers

import (
	"go/ast"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReaching(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a_test.go": `package a
func TestItself(t *testing.T)     { testkit.Size(1, 2) }
func TestByAHelper(t *testing.T)  { rounds() }
func TestByAVariable(t *testing.T) { _ = many }
func TestByAMethod(t *testing.T)  { rig{}.run() }
func TestNot(t *testing.T)        { small(); testkit.Until(t) }
func TestMain(m *testing.M)       { rounds() }`,
		"b_test.go": `package a
var few, many = 1, deep()
type rig struct{}
func (rig) run() { rounds() }
func deep() int { return rounds() }
func rounds() int { return testkit.Size(1, 2) }
func small() int { return few - few }`,
		"no_tests.go": `package a
func TestOfAnotherFile() { testkit.Size(1, 2) }`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	folder, err := Parse(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := folder.Reaching(func(n ast.Node) string {
		if s, is := n.(*ast.SelectorExpr); is && s.Sel.Name == "Size" {
			return "sized"
		}
		return ""
	})
	// TestNot uses a variable of the same declaration as a sized one, so too much is found
	// there.
	want := map[string]string{"TestItself": "sized", "TestByAHelper": "sized", "TestByAVariable": "sized", "TestByAMethod": "sized", "TestNot": "sized"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("tests that reach a size (-want +got):\n%s", diff)
	}
	tests := folder.Tests()
	slices.Sort(tests)
	if diff := cmp.Diff([]string{"TestByAHelper", "TestByAMethod", "TestByAVariable", "TestItself", "TestNot"}, tests); diff != "" {
		t.Errorf("tests (-want +got):\n%s", diff)
	}
}

func TestNoGo(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "x_test.go"), []byte("no Go"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(dir); err == nil {
		t.Error("a file that is no Go was parsed")
	}
}
