// Prose checks the words of the project: comments and texts of Go files, and Markdown. It
// reports words that docs/architecture.md has retired, and lines that are wider than 100
// columns. It also reports sentence patterns that are more frequent in 1,000 words than their
// ceilings allow.
//
//	go run ./hack/prose                    report; the exit code is 1 if there is something
//	go run ./hack/prose -w FILE.md         wrap the paragraphs of these Markdown files
//	go run ./hack/prose -count [PATH]      print the counts of all patterns, or -o json
//	go run ./hack/prose -count -v PATTERN  print file, line and sentence of each hit of a pattern
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
	counted := flag.Bool("count", false, "print counts of patterns in 1,000 words, of all files or those under the paths that are named")
	pattern := flag.String("v", "", "with -count: print each hit of this `pattern`")
	output := flag.String("o", "text", "with -count: text or json")
	flag.Parse()
	var err error
	switch {
	case *write:
		err = rewrap(flag.Args())
	case *counted:
		err = showCounts(os.Stdout, *output, *pattern, flag.Args())
	default:
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

// A file is a file that git knows.
type file struct {
	name string
	text []byte
}

// files returns the files of Go and Markdown that git knows.
func files() ([]file, error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.go", "*.md").Output()
	if err != nil {
		return nil, fmt.Errorf("listing the files: %w", err)
	}
	var all []file
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, which git does not know yet
		}
		if err != nil {
			return nil, err
		}
		all = append(all, file{name, text})
	}
	return all, nil
}

// showCounts writes the counts of the files under some paths, or of all. Only the counts of all
// files can exceed a ceiling.
func showCounts(w io.Writer, output, pattern string, under []string) error {
	all, err := files()
	if err != nil {
		return err
	}
	found, err := sentences(all, under)
	if err != nil {
		return err
	}
	t := count(found)
	if err := t.show(w, output, pattern); err != nil {
		return err
	}
	if above := t.above(); len(under) == 0 && len(above) > 0 {
		return errors.New(strings.Join(above, "\n"))
	}
	return nil
}

var errFound = errors.New("words, lines or sentences to mend, see above")

// report writes a line for each finding in the files that git knows.
func report(w io.Writer) error {
	all, err := files()
	if err != nil {
		return err
	}
	var lines []string
	for _, f := range all {
		lines = append(lines, check(f.name, f.text)...)
	}
	found, err := sentences(all, nil)
	if err != nil {
		return err
	}
	if lines = append(lines, count(found).above()...); len(lines) == 0 {
		return nil
	}
	fmt.Fprintln(w, strings.Join(lines, "\n"))
	return errFound
}
