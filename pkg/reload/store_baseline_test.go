package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestBaselineOnDisk: a baseline can be read back anywhere and at any time, until it is forgotten.
func TestBaselineOnDisk(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	if _, err := s.LoadBaseline(); !errors.Is(err, ErrNothingStored) {
		t.Errorf("without one: %v", err)
	}
	must(t, s.ForgetBaseline())
	g := full(t, 3)
	saved, err := s.SaveBaseline(Baseline{Confirmed: noon, Captured: noon, Generation: g, Native: confirmedTables()})
	must(t, err)
	if saved.ID != g.ID() || saved.Rules != 3 || saved.Chains != 1 {
		t.Errorf("saved as %+v", saved)
	}
	info, err := os.Stat(s.baselinePath())
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %o", info.Mode().Perm())
	}
	elsewhere := Identity{BootID: "boot-2", NetNS: "1", Backend: "legacy", Version: "1.8.13"}
	later := openStore(t, dir, elsewhere)
	for i := range 2 * keptGenerations { // no generation replaces it
		must(t, later.saveGeneration(full(t, i+1), "snapshot", noon))
	}
	must(t, later.Forget())
	got, err := later.LoadBaseline()
	must(t, err)
	if d := cmp.Diff(saved, got); d != "" {
		t.Errorf("read back (-want +got):\n%s", d)
	}
	must(t, later.ForgetBaseline())
	if _, err := s.LoadBaseline(); !errors.Is(err, ErrNothingStored) {
		t.Errorf("once it is forgotten: %v", err)
	}
}

// confirmedTables are native tables in a baseline.
func confirmedTables() map[string]map[string][]byte {
	return map[string]map[string][]byte{
		"ip kube-proxy":    {"base chain\x00nat-prerouting": make([]byte, BaselineDigest), "services": make([]byte, 3*BaselineDigest), "empty": {}},
		"netdev a table\n": {},
	}
}

// summed returns the text of a baseline with its sum as of now.
func summed(text string) []byte {
	i := strings.LastIndex(text, `,"sum":`)
	return private.Summed([]byte(text[:i] + "}"))
}

// TestOlderBaseline: a file of an older canaryd is read. It has no native table.
func TestOlderBaseline(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	g := full(t, 3)
	generation, err := json.Marshal(g)
	must(t, err)
	for format := 1; format <= 2; format++ {
		text := fmt.Sprintf(`{"format":%d,"confirmed":"2026-01-01T12:00:00Z","id":%q,"captured":"2026-01-01T12:00:00Z","rules":3,"chains":1,"generation":%s}`, format, g.ID(), generation)
		must(t, os.WriteFile(s.baselinePath(), []byte(text), 0o600))
		got, err := s.LoadBaseline()
		must(t, err)
		if got.ID != g.ID() || got.Rules != 3 || got.Native != nil || got.Generation.ID() != g.ID() {
			t.Errorf("format %d: %+v", format, got)
		}
	}
}

// TestBaselineThatIsNotBelieved: another user or another canaryd wrote the file, or it is torn or
// too large. No part of it is believed. It can be forgotten and replaced.
func TestBaselineThatIsNotBelieved(t *testing.T) {
	for _, test := range []struct {
		name  string
		spoil func(path, text string) error
		want  string
	}{
		{"torn", func(path, text string) error { return os.WriteFile(path, []byte(text[:len(text)/2]), 0o600) }, "corrupt"},
		{"empty", func(path, _ string) error { return os.WriteFile(path, nil, 0o600) }, "corrupt"},
		{"null", func(path, _ string) error { return os.WriteFile(path, []byte("null"), 0o600) }, "corrupt"},
		{"newer", func(path, text string) error {
			return os.WriteFile(path, []byte(strings.Replace(text, `"format":3`, `"format":4,"more":1`, 1)), 0o600)
		}, ErrNewer.Error()},
		{"with a field too many", func(path, text string) error {
			return os.WriteFile(path, summed(strings.Replace(text, `"format":3`, `"format":3,"more":1`, 1)), 0o600)
		}, "corrupt"},
		{"with another rule", func(path, text string) error {
			return os.WriteFile(path, summed(strings.Replace(text, "-j RETURN", "-j ACCEPT", 1)), 0o600)
		}, "corrupt"},
		{"with another digest of a native rule", func(path, text string) error {
			return os.WriteFile(path, []byte(strings.Replace(text, `"services":"A`, `"services":"B`, 1)), 0o600)
		}, "its sum is another"},
		{"with a piece of a digest", func(path, text string) error {
			return os.WriteFile(path, summed(strings.Replace(text, `"services":"AAAA`, `"services":"`, 1)), 0o600)
		}, "has another size"},
		{"of an older format", func(path, text string) error {
			return os.WriteFile(path, summed(strings.Replace(text, `"format":3`, `"format":0`, 1)), 0o600)
		}, "corrupt"},
		{"too large", func(path, text string) error { return os.Truncate(path, maxStored+1) }, "is too large"},
		{"another user's", func(path, _ string) error { return os.Chown(path, 1234, 0) }, "belongs to user 1234"},
		{"a link", func(path, _ string) error {
			return errors.Join(os.Rename(path, path+"-1"), os.Symlink(path+"-1", path))
		}, "is a symbolic link"},
		{"a pipe", func(path, _ string) error { return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)) }, "not a regular file"},
		{"a folder", func(path, _ string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) }, "not a regular file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "another user's" && os.Geteuid() != 0 {
				t.Skip("SKIPPED: only root can give a file to another user")
			}
			s := openStore(t, t.TempDir(), here)
			_, err := s.SaveBaseline(Baseline{Confirmed: noon, Generation: full(t, 3), Native: confirmedTables()})
			must(t, err)
			text, err := os.ReadFile(s.baselinePath())
			must(t, err)
			must(t, test.spoil(s.baselinePath(), string(text)))
			got, err := s.LoadBaseline()
			if err == nil || errors.Is(err, ErrNothingStored) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if got.Generation != nil || got.ID != "" || got.Native != nil {
				t.Errorf("believed: %+v", got)
			}
			must(t, s.ForgetBaseline())
			if _, err := s.LoadBaseline(); !errors.Is(err, ErrNothingStored) {
				t.Errorf("once it is forgotten: %v", err)
			}
		})
	}
	if !testkit.IsLarge() {
		return
	}
	s := openStore(t, t.TempDir(), here)
	huge := strings.Repeat("x", maxStored)
	if _, err := s.SaveBaseline(Baseline{Confirmed: noon, Generation: full(t, 1).With(v4.Table(rules.Filter), rules.Section{DependsOn: []string{huge}})}); err == nil {
		t.Error("a baseline that could not be read back was written")
	}
}
