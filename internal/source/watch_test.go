package source

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
	"github.com/canaryd/canaryd/pkg/rules"
)

const never = time.Hour // events alone must do

func TestFilesThatChange(t *testing.T) {
	a, b, c := service("a", 1), service("b", 2), service("c", 3)
	folder := func(t *testing.T, files map[string]string) *story {
		dir := filepath.Join(t.TempDir(), "manifests")
		write(t, dir, files)
		return watch(t, dir, never, manifest(dir))
	}
	file := func(t *testing.T, text string) *story {
		dir := t.TempDir()
		write(t, dir, map[string]string{"services.yaml": text})
		return watch(t, dir, never, manifest(filepath.Join(dir, "services.yaml")))
	}
	for name, story := range map[string]func(t *testing.T){
		"a file is renamed over": func(t *testing.T) {
			s := file(t, a)
			write(t, s.dir, map[string]string{"services.yaml": a + "---\n" + b})
			s.becomes("a", "b")
		},
		"a file is written in place": func(t *testing.T) {
			s := file(t, a)
			must(t, os.WriteFile(filepath.Join(s.dir, "services.yaml"), []byte(b), 0o644))
			s.becomes("b")
		},
		"vim moves the old file away and writes a new one": func(t *testing.T) {
			s := file(t, a)
			path := filepath.Join(s.dir, "services.yaml")
			must(t, os.WriteFile(filepath.Join(s.dir, "4913"), nil, 0o644))
			must(t, os.Remove(filepath.Join(s.dir, "4913")))
			must(t, os.Rename(path, path+"~"))
			must(t, os.WriteFile(path, []byte(b), 0o644))
			must(t, os.Remove(path+"~"))
			s.becomes("b")
		},
		"vim does so in a folder": func(t *testing.T) {
			s := folder(t, map[string]string{"a.yaml": a, "b.yaml": b})
			path := filepath.Join(s.dir, "b.yaml")
			must(t, os.Rename(path, path+"~"))
			must(t, os.WriteFile(path, []byte(c), 0o644))
			s.becomes("a", "c")
		},
		"a file appears and goes": func(t *testing.T) {
			s := folder(t, map[string]string{"a.yaml": a})
			write(t, s.dir, map[string]string{"b.json": `{"apiVersion": "v1", "kind": "List", "items": []}`, "c.yml": c})
			s.becomes("a", "c")
			must(t, os.Remove(filepath.Join(s.dir, "a.yaml")))
			s.becomes("c")
		},
		"files that do not count": func(t *testing.T) {
			s := folder(t, map[string]string{"a.yaml": a})
			write(t, s.dir, map[string]string{".b.yaml": b, "b.yaml~": b, "b.txt": b, "sub/b.yaml": b, "folder.yaml/b.yaml": b})
			s.stays()
		},
		"other words for the same": func(t *testing.T) {
			s := file(t, a)
			write(t, s.dir, map[string]string{"services.yaml": "# the shop\n---\n" + a})
			s.stays()
		},
		"many changes are one": func(t *testing.T) {
			s := folder(t, map[string]string{"a.yaml": a})
			for i := range 20 {
				write(t, s.dir, map[string]string{fmt.Sprintf("b%02d.yaml", i): service(fmt.Sprintf("b%02d", i), 100+i)})
			}
			if got := len(services(s.next())); got != 21 {
				t.Errorf("%d services, want 21 at once", got)
			}
			s.stays()
		},
		"changes without a pause are sent all the same": func(t *testing.T) {
			s := file(t, a)
			port := 0
			testkit.Until(t, "declared rules while the file changes", func() error {
				port = port%200 + 1
				write(t, s.dir, map[string]string{"services.yaml": service("b", port)})
				select {
				case <-s.Changes():
					return nil
				default:
					return errors.New("nothing was sent")
				}
			})
		},
		"who reads late gets the newest": func(t *testing.T) {
			s := file(t, a)
			write(t, s.dir, map[string]string{"services.yaml": b})
			testkit.Until(t, "the first change to be sent", full(s.Changes()))
			write(t, s.dir, map[string]string{"services.yaml": c + "\n---\napiVersion: v1\nkind: Unknown\nmetadata: {name: u}\n"})
			testkit.Until(t, "the second change's problem to be sent, after its rules", full(s.Problems()))
			s.becomes("c")
			s.stays()
		},
		"a ConfigMap's ..data is swapped": func(t *testing.T) {
			dir := t.TempDir()
			configMap(t, dir, "..2026_1", map[string]string{"a.yaml": a})
			must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")))
			s := watch(t, dir, never, manifest(dir))
			for i, text := range []string{b, c} { // twice: the watch must follow
				configMap(t, dir, fmt.Sprint("..2026_", i+2), map[string]string{"a.yaml": text})
				must(t, os.RemoveAll(filepath.Join(dir, fmt.Sprint("..2026_", i+1))))
				s.becomes(string("bc"[i]))
			}
		},
		"a file of a ConfigMap": func(t *testing.T) {
			dir := t.TempDir()
			configMap(t, dir, "..2026_1", map[string]string{"a.yaml": a})
			must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "a.yaml")))
			s := watch(t, dir, never, manifest(filepath.Join(dir, "a.yaml")))
			configMap(t, dir, "..2026_2", map[string]string{"a.yaml": b})
			s.becomes("b")
		},
		"a link leads elsewhere": func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, map[string]string{"one/a.yaml": a, "two/a.yaml": b})
			link := filepath.Join(dir, "current")
			must(t, os.Symlink("one", link))
			s := watch(t, dir, never, manifest(link))
			must(t, os.Symlink(filepath.Join(dir, "two"), link+".new"))
			must(t, os.Rename(link+".new", link))
			s.becomes("b")
			write(t, dir, map[string]string{"two/a.yaml": c})
			s.becomes("c")
		},
		"the folder is replaced": func(t *testing.T) {
			s := folder(t, map[string]string{"a.yaml": a})
			must(t, os.Rename(s.dir, s.dir+".old"))
			s.breaks("manifest", s.dir+": no such file")
			write(t, s.dir+".new", map[string]string{"b.yaml": b})
			must(t, os.Rename(s.dir+".new", s.dir))
			s.becomes("b")
			write(t, s.dir, map[string]string{"c.yaml": c})
			s.becomes("b", "c")
		},
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); story(t) })
	}
}

// configMap writes like kubelet's atomic writer.
func configMap(t *testing.T, dir, version string, files map[string]string) {
	t.Helper()
	write(t, filepath.Join(dir, version), files)
	must(t, os.Symlink(version, filepath.Join(dir, "..data_tmp")))
	must(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
}

func TestBrokenFilesChangeNothing(t *testing.T) {
	a, b := service("a", 1), service("b", 2)
	for name, c := range map[string]struct {
		then func(t *testing.T, path string)
		says string
	}{
		"cut off": {func(t *testing.T, path string) {
			must(t, os.WriteFile(path, []byte(a+"---\n"+b[:strings.Index(b, "clusterIPs")+5]), 0o644))
		}, "services.yaml:"},
		"cut off to nothing": {func(t *testing.T, path string) { must(t, os.Truncate(path, 0)) }, "services.yaml: holds no object"},
		"comments only": {func(t *testing.T, path string) {
			must(t, os.WriteFile(path, []byte("# later\n---\n"), 0o644))
		}, "services.yaml: holds no object"},
		"no YAML": {func(t *testing.T, path string) {
			must(t, os.WriteFile(path, []byte(a+"\tx: [\n"), 0o644))
		}, "services.yaml:15"},
		"a wrong field": {func(t *testing.T, path string) {
			must(t, os.WriteFile(path, []byte(strings.Replace(a, "port: 80\n", "prot: 80\n", 1)), 0o644))
		}, "Service shop/a"},
		"a service twice":    {func(t *testing.T, path string) { must(t, os.WriteFile(path, []byte(a+"---\n"+a), 0o644)) }, "is declared twice"},
		"deleted":            {func(t *testing.T, path string) { must(t, os.Remove(path)) }, "holds no file *.yaml"},
		"a link to nowhere":  {func(t *testing.T, path string) { must(t, os.Remove(path)); must(t, os.Symlink("gone", path)) }, "no such file"},
		"the folder deleted": {func(t *testing.T, path string) { must(t, os.RemoveAll(filepath.Dir(path))) }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "manifests")
			path := filepath.Join(dir, "services.yaml")
			write(t, dir, map[string]string{"services.yaml": a})
			s := watch(t, dir, never, manifest(dir))
			c.then(t, path)
			s.breaks("manifest", c.says, "the last good rules stay in force", `source="manifest"`)
			must(t, os.RemoveAll(path))
			write(t, dir, map[string]string{"services.yaml": b})
			s.becomes("b")
			if !strings.Contains(s.log.String(), "can be used again") {
				t.Errorf("the log does not say that it is mended:\n%s", s.log)
			}
		})
	}
}

func TestHalfWrittenFileWaitsForItsWriter(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"services.yaml": service("a", 1)})
	s := watch(t, dir, never, manifest(dir))
	file, err := os.Create(filepath.Join(dir, "services.yaml"))
	must(t, err)
	defer file.Close()
	// It is a whole document: only the writer knows that another one follows.
	_, err = file.WriteString(service("b", 2))
	must(t, err)
	s.stays()
	if log := s.log.String(); strings.Contains(log, "stay") {
		t.Errorf("a file was called broken while it was written:\n%s", log)
	}
	_, err = file.WriteString("---\n" + service("c", 3))
	must(t, err)
	must(t, file.Close())
	s.becomes("b", "c")
}

func TestFileThatStaysOpenIsTold(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"services.yaml": service("a", 1)})
	s := watch(t, dir, 100*time.Millisecond, manifest(dir))
	file, err := os.Create(filepath.Join(dir, "services.yaml"))
	must(t, err)
	defer file.Close()
	_, err = file.WriteString(service("b", 2))
	must(t, err)
	s.breaks("manifest", "services.yaml: another process has it open for writing")
	must(t, file.Close()) // closing a file is no event
	s.becomes("b")
}

func TestFileOpenForWritingAtStart(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "services.yaml")
	file, err := os.Create(path)
	must(t, err)
	defer file.Close()
	_, err = file.WriteString(service("b", 2))
	must(t, err)
	w := NewWatcher(nil, manifest(path))
	w.timing = timing{quiet: time.Millisecond, most: 20 * time.Millisecond, again: never}
	_, err = w.Load(t.Context())
	if err == nil || !strings.Contains(err.Error(), "open for writing") {
		t.Fatalf("error %v, want that another process writes", err)
	}
	must(t, file.Close())
	declared, err := w.Load(t.Context())
	must(t, err)
	if got := services(declared); len(got) != 1 {
		t.Errorf("services %q, want one", got)
	}
}

func TestBrokenFilesAreLoggedOnceAndCountedAlways(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"services.yaml": service("a", 1)})
	s := watch(t, dir, 50*time.Millisecond, manifest(dir))
	write(t, dir, map[string]string{"services.yaml": "x"})
	for range 3 {
		s.breaks("manifest", "services.yaml:1")
	}
	if n := strings.Count(s.log.String(), "cannot be used"); n != 1 {
		t.Errorf("logged %d times, want once:\n%s", n, s.log)
	}
	write(t, dir, map[string]string{"services.yaml": "kind: Service"})
	s.breaks("manifest")
	testkit.Pass(t, 5*s.again, "that nothing more is logged")
	if n := strings.Count(s.log.String(), "cannot be used"); n != 2 {
		t.Errorf("two errors were logged %d times:\n%s", n, s.log)
	}
}

func TestWithoutEventsFilesAreLookedAt(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"services.yaml": service("a", 1)})
	w := NewWatcher(nil, manifest(dir))
	_, err := w.Load(t.Context())
	must(t, err)
	write(t, dir, map[string]string{"services.yaml": service("b", 2)})
	if soon := w.reload(t.Context()); soon {
		t.Error("the files are said to be busy")
	}
	s := &story{T: t, Watcher: w, log: &testlog.Log{}}
	s.becomes("b")
	w.reload(t.Context())
	select {
	case <-w.Changes():
		t.Error("what did not change was sent")
	default:
	}
}

func TestEachSourceStandsForItself(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"m/a.yaml": service("a", 1), "r/site.v4": "*filter\n:SITE -\n-A INPUT -j SITE\nCOMMIT\n"})
	s := watch(t, dir, never, manifest(filepath.Join(dir, "m")), RulesDir{Dir: filepath.Join(dir, "r")})
	write(t, dir, map[string]string{"r/site.v4": "*filter\n:SITE -\n-A INPUT -j DROP\nCOMMIT\n"})
	s.breaks("rules-dir", "r/site.v4:3")
	write(t, dir, map[string]string{"m/a.yaml": service("b", 2)})
	d := s.next()
	if fmt.Sprint(services(d), own(d)) != "[b] [ipv4 filter SITE]" {
		t.Errorf("services %q, chains %q", services(d), own(d))
	}
	// A conflict is a problem of the source that changed last.
	write(t, dir, map[string]string{"r/site.v4": "*filter\n:KUBE-FORWARD -\nCOMMIT\n"})
	s.breaks("rules-dir", "r/site.v4:2: chain KUBE-FORWARD belongs to the manifest "+filepath.Join(dir, "m")+" too")
	write(t, dir, map[string]string{"m/a.yaml": service("c", 3)})
	d = s.next()
	if fmt.Sprint(services(d), own(d)) != "[c] [ipv4 filter SITE]" {
		t.Errorf("services %q, chains %q", services(d), own(d))
	}
}

func TestRunNeedsLoad(t *testing.T) {
	if err := NewWatcher(nil, manifest("/nowhere")).Run(t.Context()); err == nil {
		t.Error("Run started without Load")
	}
}

// A fake is a source of one file, and declares nothing.
type fake struct {
	path  string
	err   error
	loads int
}

func (f *fake) Name() string                               { return "fake" }
func (f *fake) files() files                               { return files{path: f.path} }
func (f *fake) recall(rules.Generation) Declared           { return Declared{} }
func (f *fake) declare([]file, Declared) (Declared, error) { f.loads++; return Declared{}, f.err }

// TestAChangeIsNotAllDecodedAgain: after a change to one of many objects, the Watcher decodes
// only that object, even if the file was broken in between.
func TestAChangeIsNotAllDecodedAgain(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "services.yaml")
	known := func(d Declared) int {
		count := 0
		for i := range 3 {
			objects, err := d.decoded.Next().Decode(path, []byte("\n"+service(fmt.Sprint("s", i), i)))
			must(t, err)
			again, err := d.decoded.Next().Decode(path, []byte("\n"+service(fmt.Sprint("s", i), i)))
			must(t, err)
			if objects.Services[0] == again.Services[0] {
				count++
			}
		}
		return count
	}
	s := &state{Source: manifest(path)}
	for _, step := range []struct {
		text  string
		known int
	}{
		{"---\n" + service("s0", 0) + "---\n" + service("s1", 1), 2},
		{"---\n" + service("s0", 0) + "---\nkind: Service\n", 2}, // like the last good text's
		{"---\n" + service("s0", 0) + "---\n" + service("s1", 1) + "---\n" + service("s2", 2), 3},
		{"---\n" + service("s2", 2), 1},
	} {
		write(t, dir, map[string]string{"services.yaml": step.text})
		if declared, _, err := s.load(); err == nil {
			s.good = declared
		}
		if got := known(s.good); got != step.known {
			t.Errorf("%d of the services are known, want %d, after\n%s", got, step.known, step.text)
		}
	}
}

func TestBusyFilesAreReadAgainUntilItIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(path, nil, 0o644))
	synctest.Test(t, func(t *testing.T) {
		f := &fake{path: path, err: &busyError{"x", "is busy"}}
		w := NewWatcher(nil, f)
		start := time.Now()
		_, err := w.Load(t.Context())
		if !isBusy(err) || time.Since(start) != defaultTiming.most {
			t.Errorf("after %s: %v", time.Since(start), err)
		}
		if want := int(defaultTiming.most/defaultTiming.quiet) + 1; f.loads != want {
			t.Errorf("%d attempts, want %d", f.loads, want)
		}
	})
}

func TestErrorsAreOneLine(t *testing.T) {
	var all []error
	for i := range 7 {
		all = append(all, fmt.Errorf("a.yaml:%d: yaml:\n  bad", i))
	}
	err := &sourceError{"manifest", errors.Join(errors.Join(all[:2]...), errors.Join(all[2:]...))}
	want := "manifest: a.yaml:0: yaml: bad; a.yaml:1: yaml: bad; a.yaml:2: yaml: bad; a.yaml:3: yaml: bad; a.yaml:4: yaml: bad; and 2 more"
	if err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
}
