package native_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// needsModule are the files that use what a kernel may lack. Where one does not load, the test
// says so; every other file has to load.
var needsModule = []string{"flowtable", "statement-queue", "object-secmark"}

// TestEveryStatementComesBack: each file of the corpus is loaded, flushed in each of two ways,
// and replayed; then nft lists the same, and the objects are the same byte by byte.
func TestEveryStatementComesBack(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/corpus/*.nft")
	if err != nil || len(files) < 90 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		for _, file := range files {
			name := strings.TrimSuffix(filepath.Base(file), ".nft")
			t.Run(name, func(t *testing.T) { comesBack(t, file) })
		}
	})
}

// load loads a text of nft's, and reports false where the kernel lacks a module for it.
func load(t *testing.T, name, text string) bool {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return true
	}
	if !slices.Contains(needsModule, name) {
		t.Fatalf("nft -f %s: %s", name, out)
	}
	t.Logf("this kernel does not load %s: %s", name, out)
	return false
}

func comesBack(t *testing.T, file string) {
	nstest.Command(t, "nft", "flush", "ruleset")
	if !loads(t, file) {
		return
	}
	conn := dial(t)
	before, was := nstest.Command(t, "nft", "-s", "list", "ruleset"), capture(t, conn)
	delete := "flush ruleset\n"
	for range 2 {
		nstest.CommandInput(t, delete, "nft", "-f", "-")
		replay(t, conn, was)
		if diff := cmp.Diff(before, nstest.Command(t, "nft", "-s", "list", "ruleset")); diff != "" {
			t.Errorf("nft lists (-before +after):\n%.4000s", diff)
		}
		sameRaw(t, was, capture(t, conn))
		delete = ""
		for id := range was.Tables {
			delete += "delete table " + id.Family.NFT() + " " + id.Name + "\n"
		}
	}
}
