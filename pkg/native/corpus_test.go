package native_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// needsModule lists the files that need a module which a kernel may lack. The test logs such a file
// if it does not load. Every other file must load.
var needsModule = []string{"flowtable", "statement-queue", "object-secmark"}

// loadCorpus loads all files of the corpus into an empty namespace, and returns their number. One
// script loads them, because an execution of nft costs more than a table. Table t of
// statement-log.nft is table t-statement-log.
func loadCorpus(t *testing.T) (loaded int) {
	t.Helper()
	nstest.NeedProgram(t, "nft")
	script := ""
	for _, file := range corpusFiles(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".nft")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text = corpusTable.ReplaceAll(text, []byte("table $1 t-"+name+" {"))
		switch {
		case !slices.Contains(needsModule, name):
			script += string(text)
		case !load(t, name, string(text)):
			continue
		}
		loaded++
	}
	nstest.CommandInput(t, script, "nft", "-f", "-")
	return loaded
}

// corpusTable is the line that opens the table of most files.
var corpusTable = regexp.MustCompile(`(?m)^table (\w+) t \{`)

// corpusFiles returns the paths of the corpus.
func corpusFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/corpus/*.nft")
	if err != nil || len(files) < 90 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	return files
}

// listedTables returns nft's list of the ruleset, by table.
func listedTables(t *testing.T, args ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for text := range strings.SplitSeq(nstest.Command(t, "nft", append(args, "list", "ruleset")...), "\n}\n") {
		head, _, _ := strings.Cut(text, "\n")
		all[tableHandle.ReplaceAllString(head, "$1")] = tableHandle.ReplaceAllString(text, "$1")
	}
	return all
}

// tableHandle matches a table's handle. A table made again has another one: the kernel never reuses
// a handle.
var tableHandle = regexp.MustCompile(`(?m)^(table .*) # handle \d+$`)

// TestEveryStatementComesBack: the corpus is loaded, flushed in two ways, and replayed. Then nft
// must list the same, and the objects must be the same byte by byte.
func TestEveryStatementComesBack(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		loaded, conn := loadCorpus(t), dial(t)
		before, was := listedTables(t, "-s"), capture(t, conn)
		if len(was.Tables) < loaded {
			t.Fatalf("%d tables of %d files", len(was.Tables), loaded)
		}
		flush := "flush ruleset\n"
		for range 2 {
			nstest.CommandInput(t, flush, "nft", "-f", "-")
			replay(t, conn, was)
			if diff := cmp.Diff(before, listedTables(t, "-s")); diff != "" {
				t.Errorf("nft lists (-before +after):\n%.4000s", diff)
			}
			sameRaw(t, was, capture(t, conn))
			flush = ""
			for id := range was.Tables {
				flush += "delete table " + id.Family.NFT() + " " + id.Name + "\n"
			}
		}
	})
}

// load loads a text of nft, and reports false if the kernel lacks a module for it.
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
