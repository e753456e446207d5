package limits

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestTableOfLimits: the table in docs/measured.md names exactly the tests of this package.
func TestTableOfLimits(t *testing.T) {
	text, err := os.ReadFile("../../docs/measured.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "\n## Limits\n")
	table, _, _ = strings.Cut(table, "\n## ")
	named := regexp.MustCompile("Test[A-Za-z]+").FindAllString(table, -1)
	if !found || len(named) < 10 {
		t.Fatalf("docs/measured.md names %d tests in its table of limits", len(named))
	}
	var have []string
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(string(text), "//go:build ") {
			continue // make runs these, and the table names make
		}
		for _, m := range regexp.MustCompile(`(?m)^func (Test[A-Z][a-zA-Z]+)\(t \*testing\.T\)`).FindAllStringSubmatch(string(text), -1) {
			if m[1] != "TestTableOfLimits" {
				have = append(have, m[1])
			}
		}
	}
	slices.Sort(have)
	slices.Sort(named)
	if diff := cmp.Diff(have, slices.Compact(named)); diff != "" {
		t.Errorf("tests here, and those in docs/measured.md (-want +got):\n%s", diff)
	}
}
