// Waits finds tests that measure time: they sleep, or they give up after a time of their own.
// On a busy machine such a test fails although the code works. A test should wait for a state,
// until the end of its package's time: testkit.Until. Time in a bubble of testing/synctest is
// virtual, and free.
//
//	go run ./hack/waits
package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// virtual are folders and files whose helpers run in their callers' bubbles of synctest.
var virtual = []string{
	"hack/progress", "internal/daemon",
	"test/interleavings/model_test.go", "test/interleavings/saved_test.go", "test/interleavings/world_test.go",
}

// may are the functions that may look at the clock, with the reasons.
var may = map[string]string{
	"internal/testkit.until":   "it waits until the end of the test's time",
	"internal/testkit.Receive": "it waits until the end of the test's time",
	"internal/testkit.Pass":    "its caller says why time is to pass",
	"internal/testkit.Stays":   "its caller says why time is to pass",

	"internal/testkit/canaryd.Process.Stop": "its caller says the limit: hack/bench, hack/demo, and a test all of its time",
	"internal/testkit/scenario.Live.poll":   "hack/demo, which is no test, says the limit",
}

func main() { os.Exit(run()) }

func run() int {
	found, err := search(".")
	if err != nil {
		fmt.Fprintln(os.Stderr, "waits:", err)
		return 2
	}
	for _, w := range found {
		fmt.Printf("%s: %s\n", w.where, w.why)
	}
	if len(found) > 0 {
		fmt.Println("Wait for a state with testkit.Until. A place that models time says so in testkit.Pass, or in hack/waits.")
		return 1
	}
	return 0
}

// search returns the waits below a folder, and the functions in may that measure no time.
func search(root string) (found []wait, err error) {
	idle := maps.Clone(may)
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			if entry != nil && entry.IsDir() && (entry.Name() == "testdata" || path != root && strings.HasPrefix(entry.Name(), ".")) {
				return filepath.SkipDir
			}
			return err
		}
		folder := filepath.ToSlash(filepath.Dir(path))
		inKit := folder == "internal/testkit" || strings.HasPrefix(folder, "internal/testkit/")
		if !strings.HasSuffix(path, "_test.go") && !(inKit && strings.HasSuffix(path, ".go")) {
			return nil
		}
		if slices.Contains(virtual, folder) || slices.Contains(virtual, filepath.ToSlash(path)) {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		waits, used := waits(set, file, folder)
		found = append(found, waits...)
		for _, name := range used {
			delete(idle, name)
		}
		return nil
	})
	for _, name := range slices.Sorted(maps.Keys(idle)) {
		found = append(found, wait{name, "the list in hack/waits has it, and it measures no time"})
	}
	return found, err
}
