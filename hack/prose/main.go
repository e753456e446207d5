// Prose checks the words of the project: comments and texts of Go files, and Markdown. It reports
// words that docs/architecture.md has retired, and lines that are wider than 100 columns.
//
//	go run ./hack/prose            report; the exit code is 1 if there is something
//	go run ./hack/prose -w FILE.md wrap the paragraphs of these Markdown files
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

func main() {
	write := flag.Bool("w", false, "wrap the paragraphs of the Markdown files that are named")
	flag.Parse()
	var err error
	if *write {
		err = rewrap(flag.Args())
	} else {
		err = report(os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(1)
	}
}

// rewrap wraps the paragraphs of Markdown files in place.
func rewrap(files []string) error {
	for _, name := range files {
		if !strings.HasSuffix(name, ".md") {
			return fmt.Errorf("%s is no Markdown: its paragraphs are not wrapped", name)
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(name, []byte(wrap(string(text))), 0o644); err != nil {
			return err
		}
	}
	return nil
}

var errFound = errors.New("words or lines to mend, see above")

// report writes a line for each finding in the files that git knows.
func report(w io.Writer) error {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.go", "*.md").Output()
	if err != nil {
		return fmt.Errorf("listing the files: %w", err)
	}
	found := false
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and git does not know yet
		}
		if err != nil {
			return err
		}
		for _, line := range check(name, text) {
			found = true
			fmt.Fprintln(w, line)
		}
	}
	if found {
		return errFound
	}
	return nil
}
