package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

var here = Identity{BootID: "boot-1", NetNS: "4026531840", Backend: "nft", Version: "1.8.9"}

func openStore(t *testing.T, dir string, identity Identity) *Store {
	t.Helper()
	s, err := OpenStore(dir, identity)
	must(t, err)
	return s
}

// generation returns a generation that differs for every n.
func generation(t *testing.T, n int) rules.Generation {
	t.Helper()
	return rules.Generation{v4.Table(rules.Nat): sectionOf(t, rules.Nat, append(slices.Clone(whole), fmt.Sprintf("-A KUBE-SVC-A -d 10.0.0.%d/32 -j RETURN", n))...)}
}

func testState() State {
	return State{
		Confirmed: noon.Add(time.Minute), Uptime: time.Hour,
		Marks: canary.Marks{
			v4.Table(rules.Nat):    canary.Mark{Nonce: "1", Witnessed: []string{"OUTPUT"}}.Trying(canary.Mark{Nonce: "2"}),
			v6.Table(rules.Filter): {Nonce: "3"},
		},
	}
}

type plainSection rules.Section

func TestWhatIsStoredComesBack(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	g, state := generation(t, 1), testState()
	if s.Holds() {
		t.Error("a new store holds something")
	}
	must(t, s.saveGeneration(g, "snapshot", noon))
	must(t, s.SaveState(state))
	if !s.Holds() {
		t.Error("the store does not hold what was saved")
	}

	gotState, gotStored, err := openStore(t, dir, here).LoadState()
	must(t, err)
	state.Format, state.Identity, state.ID = everywhere, here, g.ID()
	if d := cmp.Diff(state, gotState); d != "" {
		t.Errorf("state (-want +got):\n%s", d)
	}
	stored := Stored{Format: everywhere, Identity: here, ID: g.ID(), Source: "snapshot", Captured: noon, Rules: 7, Chains: 4, Generation: g}
	// cmp would use Section.Equal, which compares neither policies nor DependsOn.
	exactly := cmp.Transformer("Section", func(s rules.Section) plainSection { return plainSection(s) })
	if d := cmp.Diff(stored, gotStored, exactly); d != "" {
		t.Errorf("generation (-want +got):\n%s", d)
	}
}

func TestAnEmptyStoreHoldsNothing(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	if _, _, err := s.LoadState(); !errors.Is(err, ErrNothingStored) {
		t.Errorf("LoadState: %v, want ErrNothingStored", err)
	}
	for _, id := range []string{"0123456789ab", "", "../state", "0123456789AB", "0123456789abc"} {
		if _, err := s.Load(id); !errors.Is(err, ErrNothingStored) {
			t.Errorf("Load(%q): %v, want ErrNothingStored", id, err)
		}
	}
}

func TestAGenerationFromElsewhereIsRefusedWithTheDifference(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Identity)
		want   []string
	}{
		{"another boot", func(i *Identity) { i.BootID = "boot-2" }, []string{"boot", "boot-1", "boot-2"}},
		{"another network namespace", func(i *Identity) { i.NetNS = "7" }, []string{"network namespace", "4026531840", "7"}},
		{"another backend", func(i *Identity) { i.Backend = "legacy" }, []string{"backend", "nft", "legacy"}},
		{"another iptables", func(i *Identity) { i.Version = "1.8.7" }, []string{"iptables version", "1.8.9", "1.8.7"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			dir, g := t.TempDir(), generation(t, 1)
			s := openStore(t, dir, here)
			must(t, s.saveGeneration(g, "snapshot", noon))
			must(t, s.SaveState(testState()))
			there := here
			test.change(&there)
			elsewhere := openStore(t, dir, there)
			_, _, stateErr := elsewhere.LoadState()
			_, loadErr := elsewhere.Load(g.ID())
			for _, err := range []error{stateErr, loadErr} {
				if !errors.Is(err, ErrForeign) {
					t.Fatalf("error is %v, want ErrForeign", err)
				}
				for _, word := range test.want {
					if !strings.Contains(err.Error(), word) {
						t.Errorf("error %q does not say %q", err, word)
					}
				}
			}
		})
	}
}

func TestWhatWasTamperedWithIsRefused(t *testing.T) {
	tests := []struct {
		name   string
		damage func(string) string
		want   string
	}{
		{"cut off", func(s string) string { return s[:len(s)/2] }, "corrupt"},
		{"empty", func(string) string { return "" }, "corrupt"},
		{"no JSON", func(string) string { return "*nat\nCOMMIT\n" }, "corrupt"},
		{"a field of another program's", func(s string) string { return strings.Replace(s, `{`, `{"x":1,`, 1) }, "corrupt"},
		{"a rule changed", func(s string) string { return strings.Replace(s, "10.96.0.1/32", "10.96.0.3/32", 1) }, "corrupt"},
		{"a rule removed", func(s string) string { return strings.Replace(s, `"-j RETURN",`, "", 1) }, "corrupt"},
		{"a line smuggled in", func(s string) string { return strings.Replace(s, "-j RETURN", `-j RETURN\nCOMMIT`, 1) }, "corrupt"},
		{"a chain renamed to a built-in one", func(s string) string { return strings.ReplaceAll(s, `"KUBE-SVC-A"`, `"OUTPUT"`) }, "protected chain"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			dir, g := t.TempDir(), generation(t, 1)
			s := openStore(t, dir, here)
			must(t, s.saveGeneration(g, "snapshot", noon))
			must(t, s.SaveState(testState()))
			path := filepath.Join(dir, "generations", g.ID()+".json")
			text, err := os.ReadFile(path)
			must(t, err)
			damaged := test.damage(string(text))
			if damaged == string(text) {
				t.Fatalf("nothing was damaged:\n%s", text)
			}
			must(t, os.WriteFile(path, []byte(damaged), 0o600))
			_, _, err = openStore(t, dir, here).LoadState()
			if err == nil || errors.Is(err, ErrNothingStored) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one that says %q", err, test.want)
			}
		})
	}
}

// unsummed is a state as an older canaryd wrote it.
func unsummed(s string) string {
	return regexp.MustCompile(`,"sum":"[0-9a-f]*"`).ReplaceAllString(s, "")
}

// TestFormats: files without a format are of the canaryd before there was one, and can be read.
// Files of a later canaryd are refused for their format, also with unknown fields.
func TestFormats(t *testing.T) {
	for _, test := range []struct {
		name    string
		damage  func(string) string
		refused bool
	}{
		{"as written", func(s string) string { return s }, false},
		{"of the canaryd before", func(s string) string { return strings.Replace(unsummed(s), `"format":7,`, "", 1) }, false},
		{"of the one with a format", func(s string) string { return strings.Replace(unsummed(s), `"format":7,`, `"format":1,`, 1) }, false},
		{"of the one with a quarantine", func(s string) string { return strings.Replace(unsummed(s), `"format":7,`, `"format":2,`, 1) }, false},
		{"of the one with counts", func(s string) string { return strings.Replace(unsummed(s), `"format":7,`, `"format":3,`, 1) }, false},
		{"of the one without names of ipsets", func(s string) string { return strings.Replace(unsummed(s), `"format":7,`, `"format":6,`, 1) }, false},
		{"of the next one", func(s string) string { return strings.Replace(s, `"format":7,`, `"format":9,"more":{"x":[1]},`, 1) }, true},
	} {
		for _, file := range []string{"state.json", "generations/" + generation(t, 1).ID() + ".json"} {
			t.Run(test.name+" "+filepath.Base(file), func(t *testing.T) {
				dir := t.TempDir()
				s := openStore(t, dir, here)
				must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
				must(t, s.SaveState(testState()))
				text, err := os.ReadFile(filepath.Join(dir, file))
				must(t, err)
				if !strings.HasPrefix(string(text), `{"format":7,`) {
					t.Fatalf("%s begins with %.20s", file, text)
				}
				must(t, os.WriteFile(filepath.Join(dir, file), []byte(test.damage(string(text))), 0o600))
				_, _, err = openStore(t, dir, here).LoadState()
				switch {
				case !test.refused && err != nil:
					t.Error(err)
				case test.refused && (!errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "format 9, here 8")):
					t.Errorf("error is %v, want ErrNewer with both formats", err)
				}
			})
		}
	}
}

// TestWhatIsOnDiskIsNamed: the list names the generations on disk, newest first. So does the error
// about a missing generation.
func TestWhatIsOnDiskIsNamed(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	if list, offer := s.List(), s.Offer(); len(list) != 0 || offer != "there is none" {
		t.Errorf("an empty store has %v, %q", list, offer)
	}
	var want []string
	for n := range 3 {
		g := generation(t, n)
		must(t, s.saveGeneration(g, "snapshot", noon))
		must(t, os.Chtimes(s.path(g.ID()), noon, noon.Add(time.Duration(n)*time.Minute)))
		want = slices.Insert(want, 0, g.ID())
	}
	var got []string
	for i, k := range s.List() {
		got = append(got, k.ID)
		if saved := noon.Add(time.Duration(2-i) * time.Minute); !k.Saved.Equal(saved) {
			t.Errorf("%s was saved at %s, want %s", k.ID, k.Saved, saved)
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("list (-want +got):\n%s", d)
	}
	_, err := s.Load("0123456789ab")
	if want := "0123456789ab; there are " + strings.Join(want, ", "); !errors.Is(err, ErrNothingStored) || !strings.Contains(err.Error(), want) {
		t.Errorf("error is %v, want one that says %q", err, want)
	}
}

// TestKilledBetweenGenerationAndState: the state names an existing generation, even if it is old.
func TestKilledBetweenGenerationAndState(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(generation(t, 0), "snapshot", noon))
	must(t, s.SaveState(testState()))
	for n := range keptGenerations + 2 {
		must(t, s.saveGeneration(generation(t, n+1), "snapshot", noon)) // killed before SaveState
		if _, stored, err := openStore(t, dir, here).LoadState(); err != nil || stored.ID != generation(t, 0).ID() {
			t.Fatalf("after %d more: %v", n+1, err)
		}
	}
	if n := len(s.List()); n != keptGenerations {
		t.Errorf("%d generations are kept, want %d", n, keptGenerations)
	}
}

// TestLitterIsRemoved: a canaryd that is killed while it writes leaves files that are never read.
func TestLitterIsRemoved(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	g := generation(t, 1)
	must(t, s.saveGeneration(g, "snapshot", noon))
	must(t, s.SaveState(testState()))
	for _, name := range []string{"state.json.new", "generations/" + g.ID() + ".json.new", "generations/.probe-1", "generations/.x.json77"} {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600))
	}
	s = openStore(t, dir, here)
	if _, _, err := s.LoadState(); err != nil {
		t.Error(err)
	}
	must(t, s.saveGeneration(g, "snapshot", noon))
	must(t, s.SaveState(testState()))
	for _, folder := range []string{dir, filepath.Join(dir, "generations")} {
		entries, err := os.ReadDir(folder)
		must(t, err)
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".json") && !e.IsDir() {
				t.Errorf("%s is still there", e.Name())
			}
		}
	}
}

func TestAForgottenStateIsGoneAndItsGenerationStays(t *testing.T) {
	g, s := generation(t, 1), openStore(t, t.TempDir(), here)
	must(t, s.Forget())
	must(t, s.saveGeneration(g, "snapshot", noon))
	must(t, s.SaveState(testState()))
	must(t, s.Forget())
	if _, _, err := s.LoadState(); !errors.Is(err, ErrNothingStored) {
		t.Errorf("LoadState: %v, want ErrNothingStored", err)
	}
	if _, err := s.Load(g.ID()); err != nil {
		t.Errorf("Load: %v", err)
	}
}

func TestATruncatedStateIsRefused(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
	must(t, s.SaveState(testState()))
	must(t, os.Truncate(filepath.Join(dir, "state.json"), 20))
	if _, _, err := s.LoadState(); err == nil || !strings.Contains(err.Error(), "state.json is corrupt") {
		t.Errorf("error is %v", err)
	}
}

func TestTheLastFiveGenerationsAreKept(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	var ids []string
	for n := range 7 {
		g := generation(t, n)
		ids = append(ids, g.ID())
		must(t, s.saveGeneration(g, "snapshot", noon))
		// The clock of a file system may be coarse.
		age := time.Now().Add(time.Duration(n-10) * time.Second)
		must(t, os.Chtimes(filepath.Join(dir, "generations", g.ID()+".json"), age, age))
	}
	for n, id := range ids {
		_, err := s.Load(id)
		if kept := err == nil; kept != (n >= 2) {
			t.Errorf("generation %d is kept: %v (%v)", n, kept, err)
		}
	}
}

// TestTheClockWasSetBack: the file that is written now looks older than all others, and is kept
// anyway.
func TestTheClockWasSetBack(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	for n := range 7 {
		must(t, s.saveGeneration(generation(t, n), "snapshot", noon))
		later := time.Now().Add(time.Hour)
		must(t, os.Chtimes(filepath.Join(dir, "generations", generation(t, n).ID()+".json"), later, later))
	}
	must(t, s.SaveState(testState()))
	if _, _, err := s.LoadState(); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

func TestTheSameGenerationIsNotWrittenTwice(t *testing.T) {
	dir, g := t.TempDir(), generation(t, 1)
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(g, "snapshot", noon))
	path := filepath.Join(dir, "generations", g.ID()+".json")
	must(t, os.Chtimes(path, noon, noon))
	must(t, s.saveGeneration(g, "snapshot", noon))
	if info, err := os.Stat(path); err != nil || !info.ModTime().Equal(noon) {
		t.Errorf("it was written again: %v, %v", info, err)
	}
	must(t, os.Remove(path))
	must(t, s.saveGeneration(g, "snapshot", noon))
	if _, err := os.Stat(path); err != nil {
		t.Errorf("it was removed, and not written again: %v", err)
	}
	must(t, s.saveGeneration(generation(t, 2), "snapshot", noon))
	must(t, s.saveGeneration(g, "snapshot", noon))
	if _, err := s.Load(g.ID()); err != nil {
		t.Errorf("a generation that returns is not there: %v", err)
	}
}

func TestOnlyTheirOwnerReadsFilesAndFolders(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "var", "canaryd")
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
	must(t, s.SaveState(testState()))
	files := 0
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		must(t, err)
		info, err := d.Info()
		must(t, err)
		want := fs.FileMode(0o600)
		if d.IsDir() {
			want = 0o700
		} else {
			files++
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("%s has mode %o, want %o", path, got, want)
		}
		return nil
	}))
	if files != 2 {
		t.Errorf("%d files are left, want the state and a generation", files)
	}
}

func TestAFolderThatCannotBeUsedIsToldAtOnce(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "sub"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "sub", "generations"), nil, 0o600))
	for _, path := range []string{file, filepath.Join(file, "below"), filepath.Join(dir, "sub"), "/proc/self"} {
		if _, err := OpenStore(path, here); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error is %v, want one that names it", path, err)
		}
	}
}

func TestWhatCannotBeReadIsNotNothing(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	must(t, os.Mkdir(filepath.Join(dir, "state.json"), 0o700))
	if _, _, err := s.LoadState(); err == nil || errors.Is(err, ErrNothingStored) {
		t.Errorf("error is %v, want one that is not ErrNothingStored", err)
	}
}

// TestHostileStateFolder: canaryd does not read a file that another user could have put there, and
// does not block on it.
func TestHostileStateFolder(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, here)
	must(t, s.saveGeneration(generation(t, 1), "snapshot", noon))
	must(t, s.SaveState(testState()))
	state := filepath.Join(dir, "state.json")
	for name, put := range map[string]func() error{
		"a pipe": func() error { return syscall.Mkfifo(state, 0o600) },
		"a link": func() error { return os.Symlink("/proc/self/environ", state) },
	} {
		must(t, os.Remove(state))
		must(t, put())
		if _, _, err := openStore(t, dir, here).LoadState(); err == nil {
			t.Errorf("%s in place of the state: no error", name)
		}
	}
	must(t, s.SaveState(testState()))
	if _, _, err := openStore(t, dir, here).LoadState(); err != nil {
		t.Errorf("after the next save: %v", err)
	}
	must(t, os.Chmod(dir, 0o777))
	if _, err := OpenStore(dir, here); err == nil || !strings.Contains(err.Error(), "other users may write to") {
		t.Errorf("a folder that all may write to: %v", err)
	}
}

// TestFormatOfTablesOnDemand: files that name raw or security have the newest format, the state
// like its generation, so that an older canaryd refuses both. All others have the format before.
func TestFormatOfTablesOnDemand(t *testing.T) {
	raw := v4.Table(rules.Raw)
	marks := testState()
	marked := testState()
	marked.Marks = marked.Marks.With(raw, canary.Mark{Nonce: "4"})
	plain, full := generation(t, 1), generation(t, 1).With(raw, sectionOf(t, rules.Raw, ":KUBE-RAW - [0:0]", "-A OUTPUT -j KUBE-RAW", "-A KUBE-RAW -p udp -j NOTRACK"))
	for _, test := range []struct {
		name              string
		g                 rules.Generation
		state             State
		generation, whole int
	}{
		{"neither", plain, marks, everywhere, everywhere},
		{"rules and marks", full, marked, format, format},
		{"rules before marks", full, marks, format, format},
		{"marks after the rules went", plain, marked, everywhere, format},
	} {
		dir := t.TempDir()
		s := openStore(t, dir, here)
		must(t, s.saveGeneration(test.g, "snapshot", noon))
		must(t, s.SaveState(test.state))
		state, stored, err := openStore(t, dir, here).LoadState()
		must(t, err)
		if state.Format != test.whole || stored.Format != test.generation {
			t.Errorf("%s: the state has format %d, the generation %d", test.name, state.Format, stored.Format)
		}
		if d := cmp.Diff(test.g.ID(), stored.Generation.ID()); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
	}
}
