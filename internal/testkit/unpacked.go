package testkit

import (
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"testing"
)

// Unpacked returns the content of a file that gzip packed, such as a recorded rule set. The test
// fails if it cannot be read.
func Unpacked(t testing.TB, path string) string {
	t.Helper()
	packed, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	all, err := io.ReadAll(text)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return string(all)
}
