// Package outcome reads the results of tests that a binary ran elsewhere: in another userland, or
// on another kernel. [Of] reads them from the output of -test.v.
package outcome

import (
	"regexp"
	"strings"
)

// An Outcome is what became of a test: PASS, FAIL or SKIP, and what it printed unless it passed.
type Outcome struct{ Name, Result, Output string }

// verdict is the line with which a test ends, or a subtest of it. What a process in a
// namespace printed stands further to the right.
var verdict = regexp.MustCompile(`(?m)^(    )?--- (PASS|FAIL|SKIP): (\S+) \(`)

// Of reads the outcomes out of what a test binary printed with -test.v: those of its tests, or
// with subtests those of their subtests.
func Of(text string, subtests bool) []Outcome {
	var all []Outcome
	for _, m := range verdict.FindAllStringSubmatch(text, -1) {
		if (m[1] != "") != subtests {
			continue
		}
		o := Outcome{Name: m[3], Result: m[2]}
		if o.Result != "PASS" {
			o.Output = outputOf(text, o.Name)
		}
		all = append(all, o)
	}
	return all
}

// marker is a line that says of which test what follows is.
var marker = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE) +(\S+)$`)

// outputOf returns what a test and its subtests printed.
func outputOf(text, name string) string {
	var b strings.Builder
	mine := false
	for line := range strings.Lines(text) {
		if m := marker.FindStringSubmatch(strings.TrimRight(line, "\n")); m != nil {
			mine = m[1] == name || strings.HasPrefix(m[1], name+"/")
			continue
		}
		if mine {
			b.WriteString(line)
		}
	}
	return b.String()
}
