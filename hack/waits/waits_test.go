package main

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
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
		{"internal/testkit", "func Until() { for { time.Sleep(pause); if time.Since(start) > limit { return } } }", ""},
		{"internal/testkit/nodetest", "func Until() { time.Sleep(pause) }", "time.Sleep"},
	} {
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, "a_test.go", "package a\n"+test.body, 0)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, w := range waits(set, file, test.folder) {
			got = append(got, w.why)
		}
		if got := strings.Join(got, ", "); got != test.want {
			t.Errorf("%s in %s: found %q, want %q", test.body, test.folder, got, test.want)
		}
	}
}

func TestSearch(t *testing.T) {
	t.Chdir(t.TempDir())
	const sleeps = "package a\nfunc f() { time.Sleep(1) }\n"
	for _, path := range []string{
		"test/a/a_test.go", "test/a/program.go", "test/a/testdata/x_test.go", ".git/x_test.go",
		"internal/daemon/a_test.go", "internal/testkit/a/a.go", "internal/control/a.go",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(sleeps), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	found, err := search(".")
	if err != nil {
		t.Fatal(err)
	}
	const want = "# Tests that measure time, by folder. The numbers may only fall: hack/waits.\n" +
		"  1 internal/testkit/a\n  1 test/a\n"
	if diff := cmp.Diff(want, write(found)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, test := range []struct{ left, more, fewer string }{
		{want, "", ""},
		{"  1 test/a\n", "internal/testkit/a waits for time in 1 places, and hack/waits/left.txt allows 0", ""},
		{want + "  2 test/b\n", "", "test/b: 0, not 2\n"},
		{"  1 internal/testkit/a\n  3 test/a\n", "", "test/a: 1, not 3\n"},
	} {
		left, err := read(test.left)
		if err != nil {
			t.Fatal(err)
		}
		more, fewer := compare(found, left)
		if (more == "") != (test.more == "") || !strings.Contains(more, test.more) || fewer != test.fewer {
			t.Errorf("%q: more %q and fewer %q, want %q and %q", test.left, more, fewer, test.more, test.fewer)
		}
	}
	if _, err := read("many test/a\n"); err == nil {
		t.Error("a line without a number was read without an error")
	}
}
