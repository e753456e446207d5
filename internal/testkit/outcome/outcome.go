// Package outcome reads the results of tests that a binary ran elsewhere: in another userland, or
// on another kernel. [Of] reads them from the output of -test.v.
package outcome

import (
	"regexp"
	"strings"
)

// An Outcome is the result of a test: PASS, FAIL or SKIP, and its output unless it passed.
type Outcome struct{ Name, Result, Output string }

// verdict matches the last line of a test or subtest. Output of a process in a namespace is
// indented further.
var verdict = regexp.MustCompile(`(?m)^(    )?--- (PASS|FAIL|SKIP): (\S+) \(`)

// Of reads the outcomes from the output of a test binary with -test.v: of its tests or, with
// subtests, of their subtests.
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

// marker matches a line that names the test whose output follows.
var marker = regexp.MustCompile(`^=== (?:RUN|NAME|CONT|PAUSE) +(\S+)$`)

// outputOf returns the output of a test and its subtests.
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
