package test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/versions"
)

// TestPlatformsAreTried: a command tests each row of "Tested" in docs/measured.md. Rows of
// other kernels and programs are exactly those of make kernels and make versions; the others
// name a target of the Makefile.
func TestPlatformsAreTried(t *testing.T) {
	text, err := os.ReadFile("../docs/measured.md")
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, tested, _ := strings.Cut(string(text), "\n### Tested\n")
	tested, _, found := strings.Cut(tested, "\n##")
	if !found {
		t.Fatal("docs/measured.md has no section Tested, or none behind it")
	}
	own := []string{"kernels", "versions"}
	var rows []string
	for _, m := range regexp.MustCompile("(?m)^\\|[^`\n].*\\|$").FindAllString(tested, -1) {
		if strings.HasPrefix(m, "| on |") || strings.HasPrefix(m, "|---|") {
			continue
		}
		target := regexp.MustCompile("\\| `make ([a-z-]+)[^`]*` \\|$").FindStringSubmatch(m)
		if target == nil {
			t.Errorf("no command tries %s", m)
			continue
		}
		if slices.Contains(own, target[1]) {
			rows = append(rows, m)
		}
		if !strings.Contains(string(makefile), "\n"+target[1]+": ") {
			t.Errorf("the Makefile has no target for %s", m)
		}
	}
	if diff := cmp.Diff(versions.Rows(), rows); diff != "" {
		t.Errorf("what make kernels and make versions try, and docs/measured.md (-want +got):\n%s", diff)
	}
}
