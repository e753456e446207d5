package main

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/canaryd/canaryd/internal/api"
)

// lineWidth bounds a line of check in bytes, because node-problem-detector cuts a plugin's
// output there, in the middle of a word (max_output_length).
const lineWidth = 80

// lineOf returns the result of check -o line, for a plugin of node-problem-detector, and says
// if replays are paused. It names the losses. Without losses, it names the tables whose
// declared rules are refused; without those, the unknown tables.
func lineOf(s api.Status) string {
	pause := ""
	if s.Paused {
		pause = "paused; "
	}
	all := s.Tally()
	switch {
	case len(all.Lost) > 0:
		return enumerate(pause+"lost: ", names(all.Lost, true))
	case len(all.Refused) > 0:
		return enumerate(pause+"declared rules refused: ", names(all.Refused, false))
	case len(all.Unknown) > 0:
		return enumerate(pause+"unknown: ", names(all.Unknown, false))
	}
	line := fmt.Sprintf("%sintact: %d tables", pause, all.Tables)
	if warning := s.Health().Warning; warning != "" {
		if line += ", but " + warning; len(line) > lineWidth {
			line = fmt.Sprintf("%sintact: %d tables, but see canaryd status", pause, all.Tables)
		}
	}
	return line
}

// names returns the names of tables for check's line, if verdicts is true with their verdicts.
func names(list []api.TableVerdict, verdicts bool) []string {
	var words []string
	for _, t := range list {
		word := t.Table
		if verdicts {
			word += " " + string(t.Verdict)
		}
		words = append(words, word)
	}
	return words
}

// nothingLine is the line for a node without a rule to guard, which is no loss.
const nothingLine = "nothing protected: no table holds a rule to guard; see canaryd status"

// enumerate appends the items that fit into lineWidth to line, and counts the others. The first
// item is always there.
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

// errorLine returns an error as check's line, cut at lineWidth: the state is unknown.
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
