package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestPattern(t *testing.T) {
	dir := t.TempDir()
	for folder, text := range map[string]string{
		"some": `package some
func TestBesideAWriter(t *testing.T) { go func() {}() }
func TestByAHelper(t *testing.T) { helper() }
func helper() { var all sync.WaitGroup; all.Go(func() {}) }
func TestLater(t *testing.T) { time.AfterFunc(0, f) }
func TestNamed(t *testing.T) {}
func TestParallel(t *testing.T) { t.Parallel() }
func TestAlone(t *testing.T) { func() {}() }`,
		"none": `package none
func TestNone(t *testing.T) {}`,
	} {
		if err := os.Mkdir(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, folder, "a_test.go"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	some, none := filepath.Join(dir, "some"), filepath.Join(dir, "none")
	got, err := run([]string{some, "-and", "TestNamed"})
	if want := "^(TestBesideAWriter|TestByAHelper|TestLater|TestNamed)$"; err != nil || got != want {
		t.Errorf("the pattern is %s, %v, want %s", got, err, want)
	}
	// make race would run fewer tests than its script says.
	for _, args := range [][]string{{some, "-and", "TestGone"}, {some, none}} {
		if got, err := run(args); err == nil {
			t.Errorf("%q gives %s and no error", args, got)
		}
	}
}
