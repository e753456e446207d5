package main

import (
	"cmp"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lineWidth bounds a line of check in bytes: node-problem-detector cuts a plugin's output there, in
// the middle of a word (max_output_length).
const lineWidth = 80

// A tally has the tables that are not in force, with the verdicts of those that lost something.
type tally struct {
	lost, refused, unknown []string
	tables                 int // of all verdicts
}

func tallyOf(families map[rules.Family]api.Verdicts, native []api.NativeTable) (all tally) {
	add := func(table string, v canary.Verdict) {
		all.tables++
		switch {
		case v.Loss():
			all.lost = append(all.lost, fmt.Sprintf("%s %s", table, v))
		case v == canary.Refused:
			all.refused = append(all.refused, table)
		case v == canary.Unknown:
			all.unknown = append(all.unknown, table)
		}
	}
	for id, v := range api.Tables(families) {
		add(id.String(), cmp.Or(v, canary.Unknown))
	}
	for _, t := range native {
		add(t.Table, t.Verdict)
	}
	return all
}

// line says in one line what check found, and whether replays are paused. It names the losses;
// without any, the tables whose declared rules are refused; without those, the unknown tables.
func (t tally) line(paused bool) string {
	pause := ""
	if paused {
		pause = "paused; "
	}
	switch {
	case len(t.lost) > 0:
		return enumerate(pause+"lost: ", t.lost)
	case len(t.refused) > 0:
		return enumerate(pause+"declared rules refused: ", t.refused)
	case len(t.unknown) > 0:
		return enumerate(pause+"unknown: ", t.unknown)
	default:
		return fmt.Sprintf("%sintact: %d tables", pause, t.tables)
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
