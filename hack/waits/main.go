// Waits finds tests that measure time: they sleep, or they give up after a time of their own. On a
// busy machine such a test fails although the code works. A test waits for a state, until the end
// of its package's time: testkit.Until. Time in a bubble of testing/synctest is virtual, and free.
//
// Those that there are yet are counted in left.txt by folder. The numbers may only fall:
//
//	go run ./hack/waits         # compares, and lists what is new
//	go run ./hack/waits -list   # lists all
//	go run ./hack/waits -update # writes fewer into left.txt
package main

import (
	"flag"
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

const leftFile = "hack/waits/left.txt"

// virtual are folders whose helpers run in bubbles of synctest that their callers make.
var virtual = []string{"hack/progress", "internal/daemon"}

// helpers are the functions that may look at the clock.
var helpers = []string{"internal/testkit.Until", "internal/testkit.Receive", "internal/testkit.Pass", "internal/testkit.Stays", "internal/testkit.During"}

func main() {
	list := flag.Bool("list", false, "list all waits")
	update := flag.Bool("update", false, "write fewer waits into "+leftFile)
	flag.Parse()
	os.Exit(run(*list, *update))
}

func run(list, update bool) int {
	found, err := search(".")
	if err == nil && list {
		for _, folder := range slices.Sorted(maps.Keys(found)) {
			fmt.Print(lines(found[folder]))
		}
		return 0
	}
	text, readErr := os.ReadFile(leftFile)
	if err == nil {
		err = readErr
	}
	left := map[string]int{}
	if err == nil {
		left, err = read(string(text))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "waits:", err)
		return 2
	}
	more, fewer := compare(found, left)
	fmt.Print(more)
	switch {
	case more != "":
		return 1
	case fewer == "":
		return 0
	case update:
		if err := os.WriteFile(leftFile, []byte(write(found)), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "waits:", err)
			return 2
		}
		return 0
	}
	fmt.Printf("%sThere are fewer waits than %s says: go run ./hack/waits -update\n", fewer, leftFile)
	return 1
}

// search returns the waits below a folder, by the folder that they are in.
func search(root string) (map[string][]wait, error) {
	found := map[string][]wait{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			if entry != nil && entry.IsDir() && (entry.Name() == "testdata" || path != root && strings.HasPrefix(entry.Name(), ".")) {
				return filepath.SkipDir
			}
			return err
		}
		folder := filepath.ToSlash(filepath.Dir(path))
		inKit := folder == "internal/testkit" || strings.HasPrefix(folder, "internal/testkit/")
		if !strings.HasSuffix(path, "_test.go") && !(inKit && strings.HasSuffix(path, ".go")) || slices.Contains(virtual, folder) {
			return nil
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if waits := waits(set, file, folder); len(waits) > 0 {
			found[folder] = append(found[folder], waits...)
		}
		return nil
	})
	return found, err
}

// read reads left.txt: a number and a folder in each line.
func read(text string) (map[string]int, error) {
	left := map[string]int{}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		var n int
		var folder string
		if _, err := fmt.Sscanf(line, "%d %s", &n, &folder); err != nil {
			return nil, fmt.Errorf("%s: %q is no number and folder: %w", leftFile, strings.TrimSpace(line), err)
		}
		left[folder] = n
	}
	return left, nil
}

// write returns the text of left.txt.
func write(found map[string][]wait) string {
	text := "# Tests that measure time, by folder. The numbers may only fall: hack/waits.\n"
	for _, folder := range slices.Sorted(maps.Keys(found)) {
		text += fmt.Sprintf("%3d %s\n", len(found[folder]), folder)
	}
	return text
}

// compare returns a text about folders with more waits than are left there, and one about those
// with fewer.
func compare(found map[string][]wait, left map[string]int) (more, fewer string) {
	folders := maps.Clone(left)
	for folder := range found {
		folders[folder] = 0
	}
	for _, folder := range slices.Sorted(maps.Keys(folders)) {
		switch n := len(found[folder]); {
		case n > left[folder]:
			more += fmt.Sprintf("%s%s waits for time in %d places, and %s allows %d: wait for a state with testkit.Until\n",
				lines(found[folder]), folder, n, leftFile, left[folder])
		case n < left[folder]:
			fewer += fmt.Sprintf("%s: %d, not %d\n", folder, n, left[folder])
		}
	}
	return more, fewer
}

func lines(waits []wait) string {
	var text strings.Builder
	for _, w := range waits {
		fmt.Fprintf(&text, "%s: %s\n", w.where, w.why)
	}
	return text.String()
}
