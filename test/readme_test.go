// Package test compares test/README.md with the folders next to it.
package test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestReadmeListsFolders: the table of README.md lists each folder once, in their order. It
// says "no" for folders without a test for the machine's root.
func TestReadmeListsFolders(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	type row struct {
		folder string
		root   bool
	}
	var listed, there []row
	for _, m := range regexp.MustCompile("(?m)^\\|.*\\| `([a-z0-9]+)` \\| (no|some|yes) \\| [0-9]+ \\|$").FindAllStringSubmatch(string(text), -1) {
		listed = append(listed, row{m[1], m[2] != "no"})
	}
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			there = append(there, row{e.Name(), needsRoot(t, e.Name())})
		}
	}
	if diff := cmp.Diff(there, listed, cmp.AllowUnexported(row{})); diff != "" {
		t.Errorf("folders of test, and those that test/README.md lists (-want +got):\n%s", diff)
	}
}

// needsRoot reports whether some test in the folder needs the machine's root.
func needsRoot(t *testing.T, folder string) bool {
	t.Helper()
	files, err := filepath.Glob(folder + "/*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has no tests: %v", folder, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "nstest.NeedRoot(") {
			return true
		}
	}
	return false
}
