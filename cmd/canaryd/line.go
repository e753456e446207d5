package main

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lineWidth bounds a line of check in bytes: node-problem-detector cuts a plugin's output there, in
// the middle of a word (max_output_length).
const lineWidth = 80

// verdictLine says in one line what check found, and whether replays are paused. It names the
// losses; without any, the tables whose declared rules are refused; without those, the unknown
// tables.
func verdictLine(families map[rules.Family]api.Verdicts, paused bool, native ...api.NativeTable) string {
	var lost, refused, unknown []string
	tables := 0
	for _, f := range rules.Families() {
		verdicts, enabled := families[f]
		if !enabled {
			continue
		}
		for _, t := range protect.Tables() {
			tables++
			switch v := verdicts[t]; {
			case v.Loss():
				lost = append(lost, fmt.Sprintf("%s %s %s", f, t, v))
			case v == canary.Refused:
				refused = append(refused, fmt.Sprintf("%s %s", f, t))
			case v == canary.Unknown || v == "":
				unknown = append(unknown, fmt.Sprintf("%s %s", f, t))
			}
		}
	}
	for _, t := range native {
		tables++
		switch {
		case t.Verdict.Loss():
			lost = append(lost, fmt.Sprintf("%s %s", t.Table, t.Verdict))
		case t.Verdict == canary.Unknown:
			unknown = append(unknown, t.Table)
		}
	}
	pause := ""
	if paused {
		pause = "paused; "
	}
	switch {
	case len(lost) > 0:
		return enumerate(pause+"lost: ", lost)
	case len(refused) > 0:
		return enumerate(pause+"declared rules refused: ", refused)
	case len(unknown) > 0:
		return enumerate(pause+"unknown: ", unknown)
	default:
		return fmt.Sprintf("%sintact: %d tables", pause, tables)
	}
}

// nothingLine is the line of a node that has no rule to guard, which is no loss.
const nothingLine = "nothing protected: no table holds a rule to guard; see canaryd status"

// enumerate appends the items that fit, and counts the others.
func enumerate(line string, items []string) string {
	for i, item := range items {
		next := line + item
		if i > 0 {
			next = line + ", " + item
		}
		rest := ""
		if left := len(items) - i - 1; left > 0 {
			rest = fmt.Sprintf(" and %d more", left)
		}
		if i > 0 && len(next+rest) > lineWidth {
			return fmt.Sprintf("%s and %d more", line, len(items)-i)
		}
		line = next
	}
	return line
}

// errorLine says in one line why check found out nothing.
func errorLine(err error) string {
	line := strings.Join(strings.Fields("unknown: "+err.Error()), " ")
	if len(line) <= lineWidth {
		return line
	}
	const cut = "..."
	end := lineWidth - len(cut)
	for !utf8.RuneStart(line[end]) {
		end--
	}
	return line[:end] + cut
}
