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

// needsModule are the files that use what a kernel may lack. Where one does not load, the test
// says so; every other file has to load.
var needsModule = []string{"flowtable", "statement-queue", "object-secmark"}

// loadCorpus loads all files of the corpus into an empty namespace, and returns how many there are.
// They go in by one script, for an execution of nft costs more than a table: table t of
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

// listedTables returns the list of nft, by table.
func listedTables(t *testing.T, args ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for text := range strings.SplitSeq(nstest.Command(t, "nft", append(args, "list", "ruleset")...), "\n}\n") {
		head, _, _ := strings.Cut(text, "\n")
		all[tableHandle.ReplaceAllString(head, "$1")] = tableHandle.ReplaceAllString(text, "$1")
	}
	return all
}

// tableHandle is a handle that a table made again cannot have: the kernel never gives one twice.
var tableHandle = regexp.MustCompile(`(?m)^(table .*) # handle \d+$`)

// TestEveryStatementComesBack: the corpus is loaded, flushed in each of two ways, and replayed;
// then nft lists the same, and the objects are the same byte by byte.
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
