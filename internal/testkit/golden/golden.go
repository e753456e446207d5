// Package golden compares a test's result with a file in the package's testdata. [Compare] fails
// the test if they differ. The flag -update writes the file instead.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files, and documents that tests write, to disk")

// Update reports whether the flag -update is set.
func Update() bool { return *update }

// Compare compares got with a file in testdata.
func Compare(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got); -update writes it:\n%s", path, diff)
	}
}
