package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the expected outputs")

// The events of the module that written writes, recorded by: go test -json -count=1 -p 1 ./...
const recorded = "testdata/events.json"

// replay plays the recorded events at their pace to a report, with a line on standard error, and
// returns the output and the exit code.
func replay(t *testing.T, width int, ci bool, all plan) (string, int) {
	t.Helper()
	file, err := os.Open(recorded)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var out bytes.Buffer
	status := 0
	synctest.Test(t, func(t *testing.T) {
		report := newReport(&out, width, all)
		ctx, cancel := context.WithCancel(t.Context())
		ticked := make(chan struct{})
		go func() { report.tick(ctx); close(ticked) }()
		read, write := io.Pipe()
		go func() { write.CloseWithError(paced(file, write)) }()
		lines(strings.NewReader("go: downloading a module\n"), report.print)
		if err := report.read(read); err != nil {
			t.Error(err)
		}
		report.used(83 * time.Second)
		cancel()
		<-ticked
		status = report.end(ci)
	})
	return out.String(), status
}

// paced copies lines of events, with the recorded time between them.
func paced(from io.Reader, to io.Writer) error {
	last := time.Time{}
	for scan := bufio.NewScanner(from); scan.Scan(); {
		var event struct{ Time time.Time }
		if err := json.Unmarshal(scan.Bytes(), &event); err != nil {
			return err
		}
		if !event.Time.IsZero() {
			if !last.IsZero() {
				time.Sleep(event.Time.Sub(last))
			}
			last = event.Time
		}
		if _, err := to.Write(append(scan.Bytes(), '\n')); err != nil {
			return err
		}
	}
	return nil
}

func TestReport(t *testing.T) {
	for _, test := range []struct {
		name  string
		width int
		ci    bool
		all   plan
	}{
		{"plain", 0, false, plan{packages: 6, tests: 14}},
		{"plain-in-ci", 0, true, plan{packages: 6}},
		{"terminal", 60, false, plan{packages: 6, tests: 14}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, status := replay(t, test.width, test.ci, test.all)
			if status != 1 {
				t.Errorf("exit code %d, want 1: tests failed", status)
			}
			// So that the file can be read.
			got = strings.NewReplacer("\r\x1b[K", "<rewrite>").Replace(got)
			golden(t, filepath.Join("testdata", test.name+".txt"), got)
		})
	}
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s; -update writes it (-want +got):\n%s", path, diff)
	}
}

// TestExitCodes: troubles other than a failed test have the right exit code, too.
func TestExitCodes(t *testing.T) {
	line := func(action, test, output string) event {
		return event{Action: action, Package: module + "pkg/rules", Test: test, Output: output}
	}
	skip := func(why string) []event {
		return []event{
			line("start", "", ""), line("run", "TestA", ""), line("output", "TestA", "    a_test.go:1: "+why+"\n"),
			line("skip", "TestA", ""), line("pass", "", ""),
		}
	}
	for _, test := range []struct {
		name   string
		events []event
		ci     bool
		want   int
		last   string
	}{
		{"nothing ran", nil, false, 0, "0 passed, 0 failed, 0 skipped; 0 packages"},
		{"a skip", skip("SKIPPED: needs root"), false, 0, "0 passed, 0 failed, 1 skipped; 1 package"},
		{"a skip in CI", skip("SKIPPED: needs root"), true, 1, "0 passed, 0 failed, 1 skipped; 1 package"},
		{"a skip without words", skip(""), true, 1, "0 passed, 0 failed, 1 skipped; 1 package"},
		{"left to another level, in CI", skip("left to make test-large: 5,000 services"), true, 0, "0 passed, 0 failed, 0 skipped, 1 left to other levels; 1 package"},
		{"a failure", []event{line("run", "TestA", ""), line("fail", "TestA", ""), line("fail", "", "")}, false, 1, "0 passed, 1 failed, 0 skipped; 1 package"},
		{"a process that ends in a subtest", []event{line("run", "TestA", ""), line("run", "TestA/b", ""), line("fail", "", "")}, false, 1, "0 passed, 2 failed, 0 skipped; 1 package"},
		{"a process that ends outside of tests", []event{line("start", "", ""), line("fail", "", "")}, false, 1, "0 passed, 1 failed, 0 skipped; 1 package"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var lines, out bytes.Buffer
			for _, e := range test.events {
				if err := json.NewEncoder(&lines).Encode(e); err != nil {
					t.Fatal(err)
				}
			}
			report := newReport(&out, 0, plan{})
			if err := report.read(&lines); err != nil {
				t.Fatal(err)
			}
			if got := report.end(test.ci); got != test.want {
				t.Errorf("exit code %d, want %d", got, test.want)
			}
			all := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := all[len(all)-1]; !strings.HasPrefix(got, test.last+" in ") {
				t.Errorf("the last line is %q, want %q", got, test.last)
			}
		})
	}
}

// written writes the module of testdata/module, and returns its folder. Go would treat files
// there that end in .go as its own.
func written(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	files, err := filepath.Glob("testdata/module/*/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no files: ", err)
	}
	for _, file := range append(files, "testdata/module/go.mod.txt") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, strings.TrimSuffix(strings.TrimPrefix(file, "testdata/module/"), ".txt"))
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestRun runs packages of the recorded module once more, through go test.
func TestRun(t *testing.T) {
	module := written(t)
	for _, test := range []struct {
		name string
		args []string
		all  plan
		want int
	}{
		{"passes", []string{"-C", module, "-run", "TestQuick", "./good"}, plan{packages: 1}, 0},
		{"is not built", []string{"-C", module, "./broken"}, plan{packages: 1, tests: 1}, 1},
		{"fails", []string{"-C", module, "-count=1", "./bad"}, plan{packages: 1, tests: 3}, 1},
		{"is not there", []string{"-C", module, "./nowhere"}, plan{}, 1},
		{"has no tests", []string{"-C", module, "./empty"}, plan{}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := planned(test.args); got != test.all {
				t.Errorf("planned %+v, want %+v", got, test.all)
			}
			var out bytes.Buffer
			report := newReport(&out, 0, plan{})
			if got := goTest(t.Context(), test.args, report, io.Discard); got != test.want {
				t.Errorf("exit code %d, want %d:\n%s", got, test.want, &out)
			}
		})
	}
}

func TestGroups(t *testing.T) {
	got := groups(strings.Fields("-race ./a ./b -- -C test/kubernetes ./..."))
	want := [][]string{{"-race", "./a", "./b"}, {"-C", "test/kubernetes", "./..."}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(strings.Fields("test -C test/kubernetes -json ./..."), testArgs(got[1])); diff != "" {
		t.Errorf("arguments of go (-want +got):\n%s", diff)
	}
}

func TestTestsAreCounted(t *testing.T) {
	const file = `
func TestA(t *testing.T) {
func Test(t *testing.T) {}
func Test_b(t *testing.T) {
func FuzzC(f *testing.F) {
func TestMain(m *testing.M) {
func Testify(t *testing.T) {
func testD(t *testing.T) {
	func TestE(t *testing.T) {
`
	if got := tests([]byte(file)); got != 4 {
		t.Errorf("counted %d tests, want 4", got)
	}
}
