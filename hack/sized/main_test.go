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
var draws = testkit.Size(8, 25)
func TestDraws(t *testing.T) { _ = draws }
func TestLarge(t *testing.T) { testkit.Large(t, "240,000 rules") }
func TestTyped(t *testing.T) { _ = testkit.Size[int](1, 2) }
func TestOrdinary(t *testing.T) { other.Size(1, 2); Size() }`,
		"all": `package all
func TestMeasured(t *testing.T) {}`,
	} {
		if err := os.Mkdir(filepath.Join(dir, folder), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, folder, "a_test.go"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := run([]string{filepath.Join(dir, "some"), "-whole", filepath.Join(dir, "all")})
	if want := "^(TestDraws|TestLarge|TestMeasured|TestTyped)$"; err != nil || got != want {
		t.Errorf("the pattern is %s, %v, want %s", got, err, want)
	}
}
