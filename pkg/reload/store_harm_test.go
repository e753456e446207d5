package reload

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/private"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// rested returns a store with a complete generation, and a later one on the same base.
func rested(t *testing.T, dir string) (s *Store, first, second rules.Generation) {
	t.Helper()
	s = openStore(t, dir, here)
	s.wholeBelow = 0
	first = manyChains(t, 40)
	second = endpoint(first, 5)
	must(t, s.saveGeneration(first, "snapshot", noon))
	must(t, os.Chtimes(s.path(first.ID()), noon, noon))
	must(t, s.saveGeneration(second, "snapshot", noon))
	must(t, s.SaveState(testState()))
	if n := len(s.bases(t)); n != 1 {
		t.Fatalf("%d bases", n)
	}
	return s, first, second
}

// rewritten returns g with another rule in all chains of nat, too much for a difference.
func rewritten(g rules.Generation) rules.Generation {
	s := g[v4.Table(rules.Nat)]
	s.Chains = slices.Clone(s.Chains)
	for i := range s.Chains {
		s.Chains[i].Rules = []rules.Rule{spec(`-m comment --comment "` + strings.Repeat("x", 250) + `" -j RETURN`)}
	}
	return g.With(v4.Table(rules.Nat), s)
}

// rebase replaces the base by text, under the name of that content.
func (s *Store) rebase(t *testing.T, id, text string) {
	t.Helper()
	digest := sha256.Sum256([]byte(text))
	old := s.bases(t)[0]
	must(t, os.WriteFile(s.basePath(nameOf(digest[:])), []byte(text), 0o600))
	file := string(must1(os.ReadFile(s.path(id))))
	must(t, os.WriteFile(s.path(id), []byte(strings.Replace(file, old, nameOf(digest[:]), 1)), 0o600))
}

// TestADifferenceThatWasTamperedWith: a damaged file or base is not believed, and does not count as
// missing.
func TestADifferenceThatWasTamperedWith(t *testing.T) {
	file := func(change func(string) string) func(*testing.T, *Store, string) {
		return func(t *testing.T, s *Store, id string) {
			text := string(must1(os.ReadFile(s.path(id))))
			if change(text) == text {
				t.Fatalf("nothing was changed in %.300s", text)
			}
			must(t, os.WriteFile(s.path(id), []byte(change(text)), 0o600))
		}
	}
	replace := func(old, new string) func(*testing.T, *Store, string) {
		return file(func(s string) string { return strings.Replace(s, old, new, 1) })
	}
	base := func(change func(string) string) func(*testing.T, *Store, string) {
		return func(t *testing.T, s *Store, _ string) {
			path := s.basePath(s.bases(t)[0])
			text := string(must1(os.ReadFile(path)))
			if change(text) == text {
				t.Fatalf("nothing was changed in %.300s", text)
			}
			must(t, os.WriteFile(path, []byte(change(text)), 0o600))
		}
	}
	renamed := func(change func(string) string) func(*testing.T, *Store, string) {
		return func(t *testing.T, s *Store, id string) {
			text := string(must1(os.ReadFile(s.basePath(s.bases(t)[0]))))
			if change(text) == text {
				t.Fatalf("nothing was changed in %.300s", text)
			}
			s.rebase(t, id, change(text))
		}
	}
	for _, test := range []struct {
		name   string
		damage func(t *testing.T, s *Store, id string)
		want   string
	}{
		{"cut off", file(func(s string) string { return s[:len(s)/2] }), "corrupt"},
		{"cut off in its header", file(func(s string) string { return s[:60] }), "corrupt"},
		{"empty", file(func(string) string { return "" }), "corrupt"},
		{"without its difference", file(func(s string) string { return s[:strings.Index(s, `,"difference"`)] + "}" }), "corrupt"},
		{"without its base", file(func(s string) string {
			return s[:strings.Index(s, `"base"`)] + s[strings.Index(s, `"difference"`):]
		}), "corrupt"},
		{"a whole one, too", replace(`"difference":`, `"generation":{"ipv4":{}},"difference":`), "corrupt"},
		{"of a format that had no base", replace(`"format":7`, `"format":3`), "corrupt"},
		{"a field of another program's", replace(`{"name":"KUBE`, `{"x":1,"name":"KUBE`), "corrupt"},
		{"a base elsewhere", replace(`"base":"`, `"base":"../../../etc/`), "is not the name of a base"},
		{"a run of three numbers", replace(`"chains":[[0,`, `"chains":[[0,1,`), "corrupt"},
		{"a run before the first", replace(`"chains":[[0,`, `"chains":[[-1,`), "corrupt"},
		{"a run behind the last", replace(`"chains":[[0,`, `"chains":[[1000,`), "corrupt"},
		{"a run without end", replace(`"chains":[[0,`, `"chains":[[1,9223372036854775807],[0,`), "corrupt"},
		{"a run twice", replace(`"chains":[[0,`, `"chains":[[0,1],[0,`), "taken before"},
		{"a chain of a built-in name", file(func(s string) string {
			return regexp.MustCompile(`"name":"KUBE-SVC-[0-9]*","rules":\[\[0,3\],`).ReplaceAllString(s, `"name":"OUTPUT","rules":[`)
		}), "protected chain"},
		{"another rule", replace(`"-s 10.1.0.5/32`, `"-s 10.1.0.6/32`), "corrupt"},
		{"a line smuggled in", replace(`"-s 10.1.0.5/32`, `"-s 10.1.0.5/32\nCOMMIT`), "corrupt"},
		{"the base is cut off", base(func(s string) string { return s[:len(s)/2] }), "corrupt"},
		{"the base is cut off behind a line", base(func(s string) string { return s[:strings.LastIndex(s[:len(s)/2], "\n")+1] }), "has the digest"},
		{"the base is empty", base(func(string) string { return "" }), "corrupt"},
		{"the base has another rule", base(func(s string) string { return strings.Replace(s, "10.0.0.1/32", "10.0.0.2/32", 1) }), "has the digest"},
		{"the base is another one", renamed(func(s string) string { return strings.Replace(s, "10.0.0.1/32", "10.0.0.2/32", 1) }), "corrupt"},
		{"the base has fewer chains", renamed(func(s string) string { return s[:strings.LastIndex(s[:len(s)/2], "\n")+1] }), "corrupt"},
		{"the base is of another program's", renamed(func(s string) string { return strings.Replace(s, `"name"`, `"x":1,"name"`, 1) }), "unknown field"},
		{"the base is missing", func(t *testing.T, s *Store, _ string) { must(t, os.Remove(s.basePath(s.bases(t)[0]))) }, "is missing"},
		{"the base is a link", func(t *testing.T, s *Store, _ string) {
			path := s.basePath(s.bases(t)[0])
			must(t, os.Rename(path, path+"x"))
			must(t, os.Symlink(path+"x", path))
		}, "is a symbolic link"},
		{"the base is a pipe", func(t *testing.T, s *Store, _ string) {
			path := s.basePath(s.bases(t)[0])
			must(t, os.Remove(path))
			must(t, syscall.Mkfifo(path, 0o600))
		}, "is not a regular file"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			s, _, second := rested(t, dir)
			test.damage(t, s, second.ID())
			s = openStore(t, dir, here)
			_, _, err := s.LoadState()
			if err == nil || errors.Is(err, ErrNothingStored) || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want one that says %q", err, test.want)
			}
			if stored, _, err := s.Show(second.ID()); err == nil {
				t.Errorf("shown is %v", stored)
			}
			if got, ok := s.Remains(time.Time{}); !ok || got.ID == second.ID() || got.Unread == nil || !slices.Equal(got.Unread.IDs, []string{second.ID()}) {
				t.Errorf("remains are %s, unread is %+v: %t; want that %s cannot be read", got.ID, got.Unread, ok, second.ID())
			}
			_, _ = s.List(), s.Offer()
			must(t, s.saveGeneration(second, "snapshot", noon)) // the save replaces the damaged files
			if _, err := openStore(t, dir, here).Load(second.ID()); err != nil {
				t.Errorf("after the next save: %v", err)
			}
		})
	}
}

// TestWhatRestsOnNothingIsNotOffered: a generation's base is missing. The list gives that reason.
func TestWhatRestsOnNothingIsNotOffered(t *testing.T) {
	s, _, _ := rested(t, t.TempDir())
	base := s.bases(t)[0]
	if got := s.Offer(); strings.Contains(got, "none") {
		t.Errorf("offered: %s", got)
	}
	must(t, os.Remove(s.basePath(base)))
	for _, k := range s.List() {
		if want := "the file that it rests on is missing: " + base + ".base"; k.Foreign != want {
			t.Errorf("%s: %q, want %q", k.ID, k.Foreign, want)
		}
	}
	if got := s.Offer(); got != "there is none" {
		t.Errorf("offered: %s", got)
	}
}

// TestFormatsOfDifferences: a file of a later canaryd is refused for its format. The state's format
// makes an older canaryd, which reads formats up to 3, refuse all files.
func TestFormatsOfDifferences(t *testing.T) {
	newer := func(s string) string { return strings.Replace(s, `{"format":7`, `{"format":9,"more":1`, 1) }
	for name, change := range map[string]func(t *testing.T, s *Store, id string){
		"the generation": func(t *testing.T, s *Store, id string) {
			must(t, os.WriteFile(s.path(id), []byte(newer(string(must1(os.ReadFile(s.path(id)))))), 0o600))
		},
		"the base": func(t *testing.T, s *Store, id string) {
			s.rebase(t, id, strings.Replace(string(must1(os.ReadFile(s.basePath(s.bases(t)[0])))), `{"format":7`, `{"format":9`, 1))
		},
	} {
		s, _, second := rested(t, t.TempDir())
		for _, path := range []string{s.path(second.ID()), s.statePath(), s.basePath(s.bases(t)[0])} {
			if text := must1(os.ReadFile(path)); !strings.HasPrefix(string(text), `{"format":7`) {
				t.Errorf("%s begins with %.20s", path, text)
			}
		}
		change(t, s, second.ID())
		if _, err := openStore(t, s.dir, here).Load(second.ID()); !errors.Is(err, ErrNewer) || !strings.Contains(err.Error(), "format 9, here 8") {
			t.Errorf("%s: error is %v, want ErrNewer with both formats", name, err)
		}
	}
}

// TestOlderFilesAreTakenUp: large files of formats 0 to 3 are complete. The next generation needs a
// base.
func TestOlderFilesAreTakenUp(t *testing.T) {
	for older := range basedFrom {
		s := openStore(t, t.TempDir(), here)
		g := manyChains(t, 300)
		n, chains := g.Counts()
		must(t, s.write(s.path(g.ID()), Stored{Format: older, Identity: here, ID: g.ID(), Captured: noon, Rules: n, Chains: chains, Generation: g}))
		must(t, s.write(s.statePath(), State{Format: older, Identity: here, ID: g.ID()}))
		s = openStore(t, s.dir, here)
		_, stored, err := s.LoadState()
		must(t, err)
		exactly(t, g, stored.Generation)
		s.Resume(stored.ID)
		next := endpoint(g, 1)
		must(t, s.saveGeneration(next, "snapshot", noon))
		if n := len(s.bases(t)); n != 1 {
			t.Errorf("%d bases after format %d", n, older)
		}
		for _, want := range []rules.Generation{g, next} {
			stored, err := openStore(t, s.dir, here).Load(want.ID())
			must(t, err)
			exactly(t, want, stored.Generation)
		}
	}
}

// TestBasesGoWithTheirGenerations: a base stays while a generation needs it, even one that is only
// kept for a loss that waits, and no longer.
func TestBasesGoWithTheirGenerations(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	s.wholeBelow = 0
	save := func(n, chains int) string {
		g := endpoints(manyChains(t, 40), 1000*n, chains)
		must(t, s.saveGeneration(g, "snapshot", noon))
		at := noon.Add(time.Duration(n) * time.Minute)
		must(t, os.Chtimes(s.path(s.written), at, at))
		return s.written
	}
	loads := func() {
		t.Helper()
		for _, k := range s.List() {
			if _, err := openStore(t, s.dir, here).Load(k.ID); err != nil {
				t.Error(err)
			}
		}
	}
	first := save(0, 1)
	old := s.bases(t)
	must(t, s.SavePending(Pending{Identity: here, ID: first}))
	for n := 1; n < 12; n++ {
		s.base = nil // a base of its own
		save(n, 20)
		loads()
		if got, want := len(s.bases(t)), min(n, keptGenerations)+1; got > want {
			t.Errorf("generation %d: %d bases, want %d", n, got, want)
		}
		if !slices.Contains(s.bases(t), old[0]) {
			t.Errorf("generation %d: the base of the pinned one is gone", n)
		}
	}
	must(t, s.ForgetPending())
	save(12, 20)
	loads()
	if slices.Contains(s.bases(t), old[0]) {
		t.Error("the base of what is not kept any more is still there")
	}
	// A generation whose file cannot be read for now may need any base.
	orphan := strings.Repeat("0", 32)
	must(t, os.WriteFile(s.basePath(orphan), nil, 0o600))
	s.List()
	for id, h := range s.headers {
		h.err = &fs.PathError{Op: "open", Path: s.path(id), Err: syscall.EMFILE}
		s.headers[id] = h
		break
	}
	must(t, s.pruneBases())
	if !slices.Contains(s.bases(t), orphan) {
		t.Error("a base was removed while a generation could not be read")
	}
	s.headers = nil
	must(t, s.pruneBases())
	if slices.Contains(s.bases(t), orphan) {
		t.Error("a base on which nothing rests is still there")
	}
}

// TestASmallGenerationLeavesTheBase: a flush was learned, and its small generation is written
// complete. The next large generation uses the former base.
func TestASmallGenerationLeavesTheBase(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	g := manyChains(t, 300)
	must(t, s.saveGeneration(g, "snapshot", noon))
	base := s.bases(t)
	for n := range keptGenerations + 2 {
		must(t, s.saveGeneration(generation(t, n), "snapshot", noon))
	}
	g = endpoint(g, 3)
	must(t, s.saveGeneration(g, "snapshot", noon))
	if d := cmp.Diff(base, s.bases(t)); d != "" || len(base) != 1 {
		t.Errorf("bases (-before +now):\n%s", d)
	}
	stored, err := openStore(t, s.dir, here).Load(g.ID())
	must(t, err)
	exactly(t, g, stored.Generation)
}

// errKilled ends a save in a test as SIGKILL does.
var errKilled = errors.New("killed")

// TestKilledBetweenTwoSteps: canaryd is killed at each change of the folder. The next start loads
// the former state or the new one, and the list names only loadable generations. The next save
// leaves no litter.
func TestKilledBetweenTwoSteps(t *testing.T) {
	seen, hour := map[string]bool{}, time.Now().Truncate(time.Hour)
	for _, test := range []struct {
		name  string
		saves func(first rules.Generation, s *Store) rules.Generation // returns the generation that is being saved when canaryd is killed
	}{
		{"a small change", func(g rules.Generation, _ *Store) rules.Generation { return endpoint(g, 500) }},
		{"a large change", func(g rules.Generation, _ *Store) rules.Generation { return rewritten(g) }},
		{"a generation that comes back", func(g rules.Generation, _ *Store) rules.Generation { return g }},
		{"a small generation", func(g rules.Generation, s *Store) rules.Generation {
			s.wholeBelow = 1 << 20
			return endpoint(g, 500)
		}},
		{"a large change after another", func(g rules.Generation, s *Store) rules.Generation {
			must(t, s.saveGeneration(rewritten(g), "snapshot", noon))
			return endpoints(manyChains(t, 80), 500, 1)
		}},
		{"a change that is the last to need a base", func(g rules.Generation, s *Store) rules.Generation {
			for _, k := range s.List() {
				must(t, os.Chtimes(s.path(k.ID), noon, noon)) // the clock of a file system may be coarse
			}
			g = rewritten(g)
			for n := range keptGenerations - 1 {
				must(t, s.saveGeneration(endpoint(g, 100*n), "snapshot", noon))
				must(t, s.SaveState(testState()))
			}
			for id := range s.until { // none was in force lately
				s.until[id] = time.Now().Add(-30 * 24 * time.Hour)
			}
			return endpoint(g, 800)
		}},
	} {
		for step, killed := 0, true; killed; step++ {
			t.Run(fmt.Sprintf("%s/%d", test.name, step), func(t *testing.T) {
				dir := t.TempDir()
				s, first, _ := rested(t, dir)
				for n := range keptGenerations {
					must(t, s.saveGeneration(endpoint(first, 100*n), "snapshot", noon))
				}
				must(t, s.SaveState(testState()))
				next, left, at := test.saves(first, s), step, ""
				last := s.named
				s.step = func(what string) {
					if seen[what] = true; left == 0 {
						at = what
						panic(errKilled)
					}
					left--
				}
				killed = func() (ended bool) {
					defer func() {
						if got := recover(); got != nil && got != errKilled { //nolint:errorlint // a value of our own
							panic(got)
						}
					}()
					ended = true
					must(t, s.saveGeneration(next, "snapshot", noon))
					must(t, s.SaveState(testState()))
					ended = false
					return ended
				}() || at != ""
				s = openStore(t, dir, here)
				s.wholeBelow = 0
				_, stored, err := s.LoadState()
				if err != nil {
					t.Fatalf("killed before %q: %v", at, err)
				}
				if id := stored.Generation.ID(); id != last && id != next.ID() || !killed && id != next.ID() {
					t.Errorf("killed before %q: %s is loaded, want %s or %s", at, id, last, next.ID())
				}
				for _, k := range s.List() {
					if _, err := s.Load(k.ID); err != nil {
						t.Errorf("killed before %q: %v", at, err)
					}
				}
				s.Resume(stored.ID)
				for n := range keptGenerations {
					must(t, s.saveGeneration(endpoint(first, 900+n), "snapshot", noon))
				}
				// A base stays for a generation that is on disk. The newest five need at most two
				// bases, and the fullest one of this hour a third.
				rest, newest := map[string]bool{}, map[string]bool{}
				for i, k := range s.List() {
					if b := s.headers[k.ID].stored.Base; b != "" {
						rest[b] = true
						newest[b] = newest[b] || i < keptGenerations
					}
				}
				if d := cmp.Diff(slices.Sorted(maps.Keys(rest)), slices.Sorted(slices.Values(s.bases(t)))); d != "" {
					t.Errorf("killed before %q: bases (-that a generation rests on +on disk):\n%s", at, d)
				}
				maps.DeleteFunc(newest, func(_ string, is bool) bool { return !is })
				if n, older := len(newest), len(rest)-len(newest); n > 2 || older > 1 && time.Now().Truncate(time.Hour).Equal(hour) {
					t.Errorf("killed before %q: the newest rest on %d bases, older ones on %d others", at, n, older)
				}
			})
		}
	}
	for _, step := range []string{"base", "generation", "prune", "prune base", stateFile} {
		if !seen[step] {
			t.Errorf("nothing was killed before %q", step)
		}
	}
}

// TestFullDiskKeepsTheOldState: there is no room for a base or a difference. The former files stay
// as they are, and no unfinished file is left.
func TestFullDiskKeepsTheOldState(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		for name, next := range map[string]func(rules.Generation) rules.Generation{
			"a difference": func(g rules.Generation) rules.Generation { return endpoint(g, 500) },
			"a base":       rewritten,
		} {
			dir := t.TempDir()
			must(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=256k,mode=0700"))
			t.Cleanup(func() { must(t, syscall.Unmount(dir, 0)) })
			s, first, second := rested(t, dir)
			bases := s.bases(t)
			litter, err := os.Create(dir + "/litter")
			must(t, err)
			for err == nil {
				_, err = litter.Write(make([]byte, 4096))
			}
			must(t, litter.Close())
			g := next(first)
			if err := s.saveGeneration(g, "snapshot", noon); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%s: saved with %v", name, err)
			}
			_, stored, err := openStore(t, dir, here).LoadState()
			must(t, err)
			exactly(t, second, stored.Generation)
			if d := cmp.Diff(bases, s.bases(t)); d != "" {
				t.Errorf("%s: bases (-before +now):\n%s", name, d)
			}
			entries, err := os.ReadDir(s.folder())
			must(t, err)
			for _, e := range entries {
				if strings.HasSuffix(e.Name(), private.Unfinished) {
					t.Errorf("%s: %s is left", name, e.Name())
				}
			}
			must(t, os.Remove(dir+"/litter"))
			must(t, s.saveGeneration(g, "snapshot", noon))
			must(t, s.SaveState(testState()))
			_, stored, err = openStore(t, dir, here).LoadState()
			must(t, err)
			exactly(t, g, stored.Generation)
		}
	})
}

// FuzzDifference: a generation's file and its base have any content. A loaded generation matches
// its name.
func FuzzDifference(f *testing.F) {
	const id = "0123456789ab"
	head := `{"format":7,"identity":{"bootID":"boot-1","netns":"4026531840","backend":"nft","iptables":"1.8.9"},"id":"` + id + `","base":"BASE","difference":`
	base := "{\"format\":4}\n{\"family\":\"ipv4\",\"table\":\"nat\"}\n{\"name\":\"KUBE-SVC-A\",\"rules\":[\"-j RETURN\",\"-s 10.0.0.1/32 -j RETURN\"]}\n{\"name\":\"KUBE-SVC-B\"}\n"
	for _, difference := range []string{
		`{"ipv4":{"nat":{"chains":[[0,2]]}}}`,
		`{"ipv4":{"nat":{"chains":[[1,1],{"name":"KUBE-SVC-A","rules":[[1,1],"-j ACCEPT",[0,1]]}],"hooks":[{"chain":"OUTPUT","rule":"-j KUBE-SVC-A","anchor":{"position":"top","neighbour":""}}]}}}`,
		`{"ipv6":{"filter":{"chains":[[0,1]]}}}`, `{}`, `null`,
	} {
		f.Add(head+difference+"}", base)
	}
	f.Fuzz(func(t *testing.T, text, base string) {
		s := openStore(t, t.TempDir(), here)
		digest := sha256.Sum256([]byte(base))
		name := nameOf(digest[:])
		must(t, os.WriteFile(s.basePath(name), []byte(base), 0o600))
		text = strings.ReplaceAll(text, "BASE", name)
		// The file gets the ID of its content, so that the code behind that check runs, too.
		var file storedFile
		at := id
		if json.Unmarshal([]byte(text), &file) == nil {
			if chains, err := s.readBase(name); err == nil {
				if g, err := file.Difference.apply(chains); err == nil {
					at = g.ID()
				}
			}
		}
		must(t, os.WriteFile(s.path(at), []byte(text), 0o600))
		stored, rests, err := s.load(at, s.checkIdentity)
		if err != nil {
			_, _, _ = s.Show(at)
			_ = s.Offer()
			return
		}
		if got := stored.Generation.ID(); got != at {
			t.Fatalf("loaded as %s, its content is %s", at, got)
		}
		// The loaded generation can be stored again, on the same base, and stays the same.
		s.wholeBelow = 0
		s.base = rests
		must(t, s.Save(stored))
		again, err := s.Load(at)
		must(t, err)
		exactly(t, stored.Generation, again.Generation)
	})
}
