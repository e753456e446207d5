package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"
)

// widest is the largest width of a comment or a line of Markdown, in columns.
const widest = 100

// A retirement is a word that is no longer used, with its replacement.
type retirement struct {
	word    *regexp.Regexp
	instead string
}

// retired are the words that design and glossary have replaced, and vague words that hide the
// agent.
var retired = []retirement{
	retire(`nobody|somebody|anybody|whoever`, "what acts: the kernel, kube-proxy, another process, no process"),
	retire(`told|tells`, "logged, recorded, reported, known; says, shows"),
	retire(`anew`, "again"),
	retire(`lest`, "so that ... not"),
	retire(`beside`, "next to, while ... runs"),
	retire(`leans? on|leaning`, "depends on"),
	retire(`gli?mpsed?|glanced?|sightings?`, "probe"),
	retire(`thaw(ed|s)?`, "learning resumes"),
	retire(`cull(ed|s)?`, "bisect"),
	retire(`held back`, "quarantined"),
	retire(`hooks_missing|hooks missing`, "jumps_missing"),
	retire(`--hook-grace`, "--jump-grace"),
}

func retire(words, instead string) retirement {
	return retirement{regexp.MustCompile(`(?i)(^|[^\w"-])(` + words + `)($|[^\w-])`), instead}
}

// check returns the findings in one file, a line each. It skips the list of retired words
// itself and the changelog, because history quotes old words.
func check(name string, text []byte) []string {
	switch {
	case name == "hack/prose/check.go" || name == "hack/prose/prose_test.go" || name == "CHANGELOG.md":
		return nil
	case path.Ext(name) == ".md":
		return checkMarkdown(name, string(text))
	default:
		return checkGo(name, text)
	}
}

// checkMarkdown checks prose. In code and tables lines may be wide.
func checkMarkdown(name, text string) []string {
	var found []string
	fenced := false
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if fenced {
			continue
		}
		found = append(found, words(name, i+1, line)...)
		if n := utf8.RuneCountInString(line); n > widest && wrap(line) != line {
			found = append(found, fmt.Sprintf("%s:%d: %d columns, more than %d: go run ./hack/prose -w %s", name, i+1, n, widest, name))
		}
	}
	return found
}

// checkGo checks comments, and strings for retired words.
func checkGo(name string, text []byte) []string {
	var found []string
	files := token.NewFileSet()
	file := files.AddFile(name, files.Base(), len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	for {
		at, kind, literal := s.Scan()
		if kind == token.EOF {
			return found
		}
		if kind != token.COMMENT && kind != token.STRING {
			continue
		}
		start := file.Position(at)
		for i, line := range strings.Split(literal, "\n") {
			if kind == token.COMMENT || !strings.HasSuffix(name, "_test.go") { // a test's strings may be anything
				found = append(found, words(name, start.Line+i, line)...)
			}
			if kind == token.STRING || strings.HasPrefix(line, "//go:") {
				continue
			}
			if strings.HasSuffix(name, "example_test.go") || strings.HasPrefix(line, "//\t") {
				continue // the output of an Example, and code
			}
			if n := width(text, file, start, i, line); n > widest && strings.Contains(strings.TrimLeft(line, "/ "), " ") {
				found = append(found, fmt.Sprintf("%s:%d: the comment is %d columns wide, more than %d", name, start.Line+i, n, widest))
			}
		}
	}
}

// width returns the columns of a comment's line from the beginning of its line, with tabs of
// four. A comment after code has no limit, because the code determines its width.
func width(text []byte, file *token.File, start token.Position, i int, line string) int {
	if i > 0 {
		return utf8.RuneCountInString(line)
	}
	before := string(text[file.Offset(file.LineStart(start.Line)):start.Offset])
	if strings.Trim(before, "\t") != "" {
		return 0
	}
	return 4*len(before) + utf8.RuneCountInString(line)
}

// words returns a finding for each retired word of a line.
func words(name string, number int, line string) []string {
	var found []string
	for _, r := range retired {
		if m := r.word.FindStringSubmatch(line); m != nil {
			found = append(found, fmt.Sprintf("%s:%d: %q is retired: write %s", name, number, m[2], r.instead))
		}
	}
	return found
}
