package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// entry returns an entry with a record and, unless it is empty, a detail.
func entry(id, record, detail string) Entry {
	e := Entry{ID: id, Record: json.RawMessage(fmt.Sprintf(`{"says":%q}`, record))}
	if detail != "" {
		e.Detail = json.RawMessage(fmt.Sprintf("%q", detail))
	}
	return e
}

// A writer runs a journal and notes its reports.
type writer struct {
	*Journal
	mu      sync.Mutex
	reports []error
	ended   sync.WaitGroup
}

// run runs a journal on a folder until the test ends.
func run(t *testing.T, dir string) *writer {
	w := &writer{Journal: New(dir)}
	w.start(t)
	return w
}

func (w *writer) start(t *testing.T) {
	w.ended.Go(func() {
		w.Run(func(err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.reports = append(w.reports, err)
		})
	})
	t.Cleanup(w.close)
}

func (w *writer) close() {
	select {
	case <-w.Journal.ended:
	default:
		w.Close()
	}
	w.ended.Wait()
}

// last returns the newest report.
func (w *writer) last() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.reports) == 0 {
		return nil
	}
	return w.reports[len(w.reports)-1]
}

func keep(t *testing.T, j *Journal, entries ...Entry) {
	t.Helper()
	for _, e := range entries {
		if err := j.Keep(e); err != nil {
			t.Fatal(err)
		}
	}
}

// wantLoaded fails unless a new journal on the folder holds exactly these.
func wantLoaded(t *testing.T, dir string, want ...Entry) {
	t.Helper()
	got, err := New(dir).Load(100)
	if err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(texts(want), texts(got)); diff != "" {
		t.Errorf("what is on disk (-want +got):\n%s", diff)
	}
}

func texts(entries []Entry) []string {
	list := []string{}
	for _, e := range entries {
		list = append(list, fmt.Sprintf("%s %s %s", e.ID, e.Record, e.Detail))
	}
	return list
}

// TestKeptOverARestart: the next journal has the newest version of each entry, and Find returns
// its detail.
func TestKeptOverARestart(t *testing.T) {
	dir := t.TempDir()
	first := run(t, dir)
	keep(t, first.Journal, entry("a1", "pending", "the rules"), entry("b2", "another", ""))
	first.close()
	second := run(t, dir)
	keep(t, second.Journal, entry("a1", "proved", ""))
	got, err := second.Find(t.Context(), "a1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(texts([]Entry{entry("a1", "proved", "the rules")}), texts([]Entry{got})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, err := second.Find(t.Context(), "a"); !errors.Is(err, ErrNotFound) {
		t.Errorf("half an ID: %v", err)
	}
	if second.last() != nil {
		t.Error(second.last())
	}
	second.close()
	wantLoaded(t, dir, entry("a1", "proved", ""), entry("b2", "another", ""))
	if newest, _ := New(dir).Load(1); len(newest) != 1 || newest[0].ID != "b2" {
		t.Errorf("the newest is %+v", newest)
	}
	if _, err := second.Find(t.Context(), "a1"); err == nil {
		t.Error("a journal that has ended was asked and answered")
	}
	info, err := os.Stat(second.path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// TestWhatACrashLeaves: the file has a damaged line, garbage and hostile lines. They are
// skipped, and all lines before and after them are read.
func TestWhatACrashLeaves(t *testing.T) {
	good := `{"id":"a1","record":{"says":"before"}}` + "\n"
	for name, bad := range map[string]string{
		"torn line":           `{"id":"b2","record":{"says":"af`,
		"torn after ID":       `{"id":"b2"`,
		"torn before newline": "\n" + `{"id":"a1"}`,
		"zeros":               strings.Repeat("\x00", 5000),
		"no record":           `{"id":"b2"}` + "\n",
		"other ID":            `{"id":"../../etc","record":{}}` + "\n",
		"long ID":             `{"id":"` + strings.Repeat("a", 17) + `","record":{}}` + "\n",
		"empty ID":            `{"id":"","record":{}}` + "\n",
		"not JSON":            "\xff\xfe\n\n\n{}\n[]\nnull\n",
		"endless line":        `{"id":"b2","record":"` + strings.Repeat("a", 3*maxLine),
		"endless, ended":      `{"id":"b2","record":"` + strings.Repeat("a", 3*maxLine) + "\"}\n",
		"deep":                strings.Repeat(`[`, 100_000) + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j := New(dir)
			if err := os.WriteFile(j.path, []byte(good+bad), 0o644); err != nil {
				t.Fatal(err)
			}
			wantLoaded(t, dir, entry("a1", "before", ""))
			w := run(t, dir)
			keep(t, w.Journal, entry("c3", "after", ""))
			w.close()
			if w.last() != nil {
				t.Error(w.last())
			}
			wantLoaded(t, dir, entry("a1", "before", ""), entry("c3", "after", ""))
			if info, err := os.Stat(j.path); err != nil || info.Mode() != 0o600 {
				t.Errorf("mode %v, %v: others may read it", info.Mode(), err)
			}
		})
	}
}

// TestBounded: after any number of entries there are only two files of bounded size, with the
// newest entries.
func TestBounded(t *testing.T) {
	dir := t.TempDir()
	w := &writer{Journal: New(dir)}
	w.room = maxFile / 64 // as a file of so few entries
	w.start(t)
	const n = 120
	detail := strings.Repeat("r", 100<<10/64)
	id := func(i int) string { return fmt.Sprintf("%016x", i) }
	for i := range n {
		keep(t, w.Journal, entry(id(i), "x", detail))
		if i%10 == 0 { // let it catch up
			_, err := w.Find(t.Context(), id(i))
			must(t, err)
		}
	}
	w.close()
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Errorf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		if info, err := f.Info(); err != nil || info.Size() > w.room || info.Mode() != 0o600 {
			t.Errorf("%s: %d bytes, mode %v, %v", f.Name(), info.Size(), info.Mode(), err)
		}
	}
	got, err := New(dir).Load(1000)
	if err != nil || len(got) < 40 || got[len(got)-1].ID != id(n-1) {
		t.Errorf("%d entries, %v; want the newest 40 at least", len(got), err)
	}
	if _, err := New(dir).find(id(0), nil); err == nil {
		t.Error("the oldest is still there")
	}
}

// TestTooLong: a detail that is too long is left out. An entry that is too long is reported, and
// delays no other entry.
func TestTooLong(t *testing.T) {
	dir := t.TempDir()
	w := run(t, dir)
	keep(t, w.Journal, entry("a1", "long detail", strings.Repeat("r", maxLine)))
	if e, err := w.Find(t.Context(), "a1"); err != nil || e.Detail != nil || w.last() != nil {
		t.Errorf("%d bytes of detail, %v, %v", len(e.Detail), err, w.last())
	}
	keep(t, w.Journal, entry("b2", strings.Repeat("r", maxLine), ""))
	if _, err := w.Find(t.Context(), "b2"); !errors.Is(err, ErrNotFound) || !errors.Is(w.last(), errOversize) {
		t.Errorf("%v, %v", err, w.last())
	}
	keep(t, w.Journal, entry("c3", "next", ""))
	if _, err := w.Find(t.Context(), "c3"); err != nil || w.last() != nil {
		t.Errorf("%v, %v", err, w.last())
	}
}

// TestDiskTrouble: the disk is full. Entries that cannot be written are reported, kept within
// bounds, and found. They are written when the disk has room again, without a further call.
func TestDiskTrouble(t *testing.T) {
	for name, trouble := range map[string]func(t *testing.T, path string) (undo func()){
		"folder in its place": func(t *testing.T, path string) func() {
			must(t, os.Mkdir(path, 0o700))
			return func() { must(t, os.Remove(path)) }
		},
		"link in its place": func(t *testing.T, path string) func() {
			must(t, os.Symlink("/dev/null", path))
			return func() { must(t, os.Remove(path)) }
		},
		"pipe in its place": func(t *testing.T, path string) func() {
			must(t, syscall.Mkfifo(path, 0o600))
			return func() { must(t, os.Remove(path)) }
		},
		"folder gone": func(t *testing.T, path string) func() {
			must(t, os.Remove(filepath.Dir(path)))
			return func() { must(t, os.Mkdir(filepath.Dir(path), 0o700)) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "state")
				must(t, os.Mkdir(dir, 0o700))
				undo := trouble(t, New(dir).path)
				w := run(t, dir)
				for i := range unwritten + 4 {
					keep(t, w.Journal, entry(fmt.Sprintf("%x", i), "x", ""))
					synctest.Wait()
				}
				if w.last() == nil {
					t.Fatal("nothing is reported")
				}
				if _, err := w.Find(t.Context(), "3"); err == nil {
					t.Error("more is kept in memory than ought to be")
				}
				if e, err := w.Find(t.Context(), "4"); err != nil || e.ID != "4" {
					t.Errorf("what is not written yet: %+v, %v", e, err)
				}
				undo()
				time.Sleep(retryAfter + time.Second)
				synctest.Wait()
				if w.last() != nil {
					t.Errorf("the disk is well again: %v", w.last())
				}
				w.close()
				got, err := New(dir).Load(100)
				if err != nil || len(got) != unwritten {
					t.Errorf("%d entries on disk, %v; want %d", len(got), err, unwritten)
				}
			})
		})
	}
}

// TestFullDisk: a partly written line is removed, so that it takes no room.
func TestFullDisk(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		dir := t.TempDir()
		must(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
		w := run(t, dir)
		keep(t, w.Journal, entry("a1", "fits", ""))
		_, err := w.Find(t.Context(), "a1")
		must(t, err)
		before, err := os.Stat(w.path)
		must(t, err)
		keep(t, w.Journal, entry("b2", "does not", strings.Repeat("r", 100<<10)))
		if _, err := w.Find(t.Context(), "b2"); err != nil || !errors.Is(w.last(), syscall.ENOSPC) {
			t.Errorf("%v, reported %v", err, w.last())
		}
		if after, err := os.Stat(w.path); err != nil || after.Size() != before.Size() {
			t.Errorf("%d bytes, %v; before %d", after.Size(), err, before.Size())
		}
		wantLoaded(t, dir, entry("a1", "fits", ""))
		w.close()
		must(t, syscall.Unmount(dir, 0))
	})
}

// TestKeepNeverWaits: Keep returns an error at once if the queue is full.
func TestKeepNeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := New(t.TempDir()) // without Run
		for range queued {
			keep(t, j, entry("a1", "x", ""))
		}
		if err := j.Keep(entry("a1", "x", "")); !errors.Is(err, ErrBusy) {
			t.Errorf("got %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := j.Find(ctx, "a1"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

// TestLoadTellsTrouble: if one file cannot be read, the other one is still read.
func TestLoadTellsTrouble(t *testing.T) {
	dir := t.TempDir()
	j := New(dir)
	if got, err := j.Load(100); len(got) != 0 || err != nil {
		t.Errorf("no journal yet: %v, %v", got, err)
	}
	must(t, os.Mkdir(j.path, 0o700))
	must(t, os.WriteFile(j.old, []byte(`{"id":"a1","record":{}}`+"\n"), 0o600))
	got, err := j.Load(100)
	if len(got) != 1 || err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%d entries, %v", len(got), err)
	}
}

// FuzzRead: for any content of the file, reading ends and yields only sound entries, and an
// entry that is written after it is found again.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		``, "\n", `{"id":"a1","record":{}}`, `{"id":"a1","record":{},"detail":[1]}` + "\n" + `{"id":"a1","record":1}` + "\n", `{"id":"A1","record":{}}` + "\n",
		`{"ID":"a1","Record":null}` + "\n", "\x00\n\xff",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		j := New(t.TempDir())
		must(t, os.WriteFile(j.path, text, 0o600))
		before, err := j.Load(10)
		must(t, err)
		if len(before) > 10 {
			t.Errorf("%d entries, want at most 10", len(before))
		}
		for _, e := range before {
			if !isID(e.ID) || !json.Valid(e.Record) || e.Detail != nil {
				t.Errorf("entry %+v", e)
			}
		}
		mine := entry("0123456789abcdef", "mine", "all of it")
		if _, err := j.write([]Entry{mine}); err != nil {
			t.Fatal(err)
		}
		got, err := j.find(mine.ID, nil)
		must(t, err)
		if diff := cmp.Diff(texts([]Entry{mine}), texts([]Entry{got})); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		after, err := j.Load(10)
		must(t, err)
		if len(after) == 0 || after[len(after)-1].ID != mine.ID && !strings.Contains(string(text), mine.ID) {
			t.Errorf("%d entries, the newest is not the last", len(after))
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestFileIsThereBeforeTheFirstEntry: a program that follows the file finds it as soon as the
// journal runs, and other users cannot read it.
func TestFileIsThereBeforeTheFirstEntry(t *testing.T) {
	dir := t.TempDir()
	j := New(dir)
	j.Close()
	j.Run(func(err error) { t.Errorf("nothing was to be written: %v", err) })
	info, err := os.Stat(filepath.Join(dir, "journal.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 || info.Size() != 0 {
		t.Errorf("the file is %v with %d bytes", info.Mode(), info.Size())
	}
}
