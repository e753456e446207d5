package main

import (
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWaits(t *testing.T) {
	for _, test := range []struct{ folder, body, want string }{
		{"test/a", "func f() { time.Sleep(time.Second) }", "time.Sleep"},
		{"test/a", "func f() { select { case <-done: case <-time.After(limit): } }", "time.After"},
		{"test/a", "func f() { time.AfterFunc(limit, cancel) }", "time.AfterFunc"},
		{"test/a", "func f() { ctx, c := context.WithTimeout(ctx, time.Second) }", "context.WithTimeout"},
		{"test/a", "func f() { ctx, c := context.WithTimeoutCause(ctx, limit, cause) }", "context.WithTimeoutCause"},
		{"test/a", "func f() { for { if time.Since(start) > limit { return } } }", "a loop with an end in time"},
		{"test/a", "func f() { for time.Now().Before(end) { } }", "a loop with an end in time"},
		{"test/a", "func f() { for range list { for limit > time.Since(start) { } } }", "a loop with an end in time"},
		{"test/a", "func f() { for ; time.Now().Before(end); time.Sleep(pause) { } }", "a loop with an end in time, time.Sleep"},
		{"test/a", "func f() { synctest.Test(t, func(t *testing.T) { time.Sleep(time.Hour) }) }", ""},
		{"test/a", "func f() { took := time.Since(start); record(took < limit) }", ""},
		{"test/a", "func f() { ctx, c := context.WithCancel(ctx); <-time.Tick(a) }", ""},
		{"internal/testkit", "func until() { for { time.Sleep(pause); if time.Since(start) > limit { return } } }", ""},
		{"internal/testkit/nodetest", "func Until() { time.Sleep(pause) }", "time.Sleep"},
		{"internal/testkit", "func (u U) Until() { time.Sleep(pause) }", "time.Sleep"},
		{"internal/testkit/canaryd", "func (p *Process) Stop() { <-time.After(within) }", ""},
		{"internal/testkit/canaryd", "func Stop() { <-time.After(within) }", "time.After"},
	} {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, "a_test.go", "package a\n"+test.body, 0)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		found, _ := waits(set, file, test.folder)
		for _, w := range found {
			got = append(got, w.why)
		}
		if got := strings.Join(got, ", "); got != test.want {
			t.Errorf("%s in %s: found %q, want %q", test.body, test.folder, got, test.want)
		}
	}
}

// TestSearch: the search finds waits in tests and in the helpers of tests, and a function of
// the list that has lost its reason.
func TestSearch(t *testing.T) {
	t.Chdir(t.TempDir())
	const sleeps = "package a\nfunc f() { time.Sleep(1) }\n"
	files := map[string]string{"internal/testkit/canaryd/canaryd.go": "package a\nfunc (p *Process) Stop() { time.Sleep(1) }\n"}
	for _, path := range []string{
		"test/a/a_test.go", "test/a/program.go", "test/a/testdata/x_test.go", ".git/x_test.go", "internal/daemon/a_test.go",
		"internal/testkit/a/a.go", "internal/control/a.go", "test/interleavings/model_test.go", "test/interleavings/a_test.go",
	} {
		files[path] = sleeps
	}
	for path, text := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	found, err := search(".")
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, w := range found {
		got = append(got, w.where+": "+w.why)
	}
	for _, path := range []string{"internal/testkit/a/a.go", "test/a/a_test.go", "test/interleavings/a_test.go"} {
		want = append(want, path+":2:12: time.Sleep")
	}
	for _, name := range slices.Sorted(maps.Keys(may)) {
		if name != "internal/testkit/canaryd.Process.Stop" {
			want = append(want, name+": the list in hack/waits has it, and it measures no time")
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
