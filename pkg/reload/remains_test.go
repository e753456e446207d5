package reload

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestRemains: Remains finds the files of an earlier run of this boot and namespace, also if some
// are broken.
func TestRemains(t *testing.T) {
	tear := func(t *testing.T, path string) { must(t, os.WriteFile(path, []byte(`{"format":2,`), 0o600)) }
	for _, test := range []struct {
		name   string
		change func(t *testing.T, dir string, newest string, now *Identity)
		none   bool
		marks  bool // they are known
		older  bool // the newest generation cannot be read
	}{
		{name: "all is well", change: func(*testing.T, string, string, *Identity) {}, marks: true},
		{name: "another version", change: func(_ *testing.T, _, _ string, now *Identity) { now.Version = "1.8.11" }, marks: true},
		{name: "another backend", change: func(_ *testing.T, _, _ string, now *Identity) { now.Backend = "legacy" }, marks: true},
		{name: "another boot", change: func(_ *testing.T, _, _ string, now *Identity) { now.BootID = "boot-2" }, none: true},
		{name: "another namespace", change: func(_ *testing.T, _, _ string, now *Identity) { now.NetNS = "7" }, none: true},
		{name: "a torn state", change: func(t *testing.T, dir, _ string, _ *Identity) { tear(t, filepath.Join(dir, stateFile)) }},
		{name: "a torn generation", change: func(t *testing.T, dir, newest string, _ *Identity) {
			tear(t, filepath.Join(dir, "generations", newest+".json"))
		}, marks: true, older: true},
		{name: "a torn state of another boot", change: func(t *testing.T, dir, _ string, now *Identity) {
			tear(t, filepath.Join(dir, stateFile))
			now.BootID = "boot-2"
		}, none: true},
		{name: "no state", change: func(t *testing.T, dir, _ string, now *Identity) { must(t, openStore(t, dir, *now).Forget()) }, none: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir, now := t.TempDir(), here
			s := openStore(t, dir, here)
			older, newest := generation(t, 1), generation(t, 2)
			must(t, s.saveGeneration(older, "snapshot", noon))
			must(t, os.Chtimes(s.path(older.ID()), noon, noon))
			must(t, s.saveGeneration(newest, "snapshot", noon))
			must(t, s.SaveState(testState()))
			test.change(t, dir, newest.ID(), &now)
			got, ok := openStore(t, dir, now).Remains(time.Time{})
			if ok == test.none {
				t.Fatalf("found %+v: %t", got, ok)
			}
			if test.none {
				return
			}
			want := newest.ID()
			if test.older {
				want = older.ID()
			}
			if got.ID != want || got.Generation.ID() != want || !got.Identity.sameNode(here) || got.Identity.Backend != "nft" {
				t.Errorf("found %+v, want generation %s", got, want)
			}
			if (got.Marks != nil) != test.marks || (got.Uptime == time.Hour) != test.marks {
				t.Errorf("marks %v of %s, known: %t", got.Marks, got.Uptime, test.marks)
			}
		})
	}
}

// TestPending: a loss that waits keeps its generation on disk, however many follow.
func TestPending(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	if _, err := s.LoadPending(); !errors.Is(err, ErrNothingStored) {
		t.Errorf("of a new store: %v", err)
	}
	lost := generation(t, 0)
	must(t, s.saveGeneration(lost, "snapshot", noon))
	want := Pending{Format: everywhere, Identity: here, ID: lost.ID(), Reason: "it is old", Record: json.RawMessage(`{"id":"1"}`)}
	must(t, s.SavePending(want))
	stays := func(s *Store, from, to int, want bool) {
		t.Helper()
		for n := from; n < to; n++ {
			must(t, s.saveGeneration(generation(t, n), "snapshot", noon))
		}
		if got := slices.ContainsFunc(s.List(), func(k Kept) bool { return k.ID == lost.ID() }); got != want {
			t.Errorf("the generation is kept: %t, want %t", got, want)
		}
	}
	stays(s, 1, 8, true)
	s = openStore(t, dir, here)
	got, err := s.LoadPending()
	must(t, err)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	stays(s, 8, 16, true)
	if _, err := s.LoadHere(lost.ID()); err != nil {
		t.Error(err)
	}
	later := here
	later.BootID = "boot-2"
	if _, err := openStore(t, dir, later).LoadPending(); !errors.Is(err, ErrForeign) {
		t.Errorf("in another boot: %v", err)
	}
	must(t, s.ForgetPending())
	must(t, s.ForgetPending())
	stays(s, 16, 24, false)
}

func TestLastBackend(t *testing.T) {
	dir := t.TempDir()
	if got := LastBackend(filepath.Join(dir, "none"), here); got != "" {
		t.Errorf("of no folder: %q", got)
	}
	legacy := here
	legacy.Backend = "legacy"
	s := openStore(t, dir, legacy)
	must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
	must(t, s.SaveState(testState()))
	if got := LastBackend(dir, here); got != "legacy" {
		t.Errorf("got %q", got)
	}
	for _, change := range []func(*Identity){func(i *Identity) { i.BootID = "boot-2" }, func(i *Identity) { i.NetNS = "7" }} {
		there := here
		change(&there)
		if got := LastBackend(dir, there); got != "" {
			t.Errorf("of %+v: %q", there, got)
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, stateFile), []byte(`{"identity":7}`), 0o600))
	if got := LastBackend(dir, here); got != "" {
		t.Errorf("of a torn state: %q", got)
	}
}
