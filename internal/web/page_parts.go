package web

import (
	"fmt"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// nothingHeadline returns the headline of a node on which nothing is protected.
func nothingHeadline(n api.Nothing) pageVerdict {
	return pageVerdict{Class: "unknown", Title: "Nothing protected", Lines: []string{
		api.Upper(n.String()) + ".",
		"A new node is so for a moment. If this one is not new, canaryd guards nothing that matters here: see --protect, and which mode kube-proxy is in.",
	}}
}

// refusedLines names the declared rules that are refused, with file and line.
func refusedLines(s api.Status) []string {
	const shown = 5
	var lines []string
	for i, r := range s.DeclaredRefused {
		if i == shown {
			lines = append(lines, fmt.Sprintf("And %d more: canaryd status lists them.", len(s.DeclaredRefused)-shown))
			break
		}
		lines = append(lines, fmt.Sprintf("%s %s: %s is refused: %s.", r.Family, r.Table, r.Place(), r.Meaning))
	}
	if broken := s.BrokenSource(); broken != nil {
		lines = append(lines, api.Upper(broken.Error())+".")
	}
	return append(lines, "These tables keep what was in force before; all others are as declared. canaryd status quotes the rule and the reason.")
}

// sourceWarning returns a warning about broken files of declared rules, if there are any.
func sourceWarning(s api.Status) []pageWarning {
	var lines []string
	for _, e := range s.SourceErrors {
		lines = append(lines, api.Upper(e.Line()))
	}
	if len(lines) == 0 {
		return nil
	}
	const shown = 5
	if n := len(lines) - shown; n > 0 {
		lines = append(lines[:shown], fmt.Sprintf("And %d more", n))
	}
	return []pageWarning{{Name: "sources", Class: "bad", Title: "Files that declare rules have errors.",
		Text: strings.Join(lines, ". ") + ". The reasons:", Command: "canaryd status"}}
}

// drillLines says when the last drill was, if it has passed.
func drillLines(s api.Status, now time.Time) []string {
	if d := s.LastDrill; d != nil && d.Result == api.DrillPassed {
		return []string{"The last drill passed " + agoText(d.Time, now) + "."}
	}
	return nil
}

// drillWarning returns a warning if the last drill has failed.
func drillWarning(s api.Status, now time.Time) []pageWarning {
	d := s.LastDrill
	if d == nil || d.Result != api.DrillFailed {
		return nil
	}
	return []pageWarning{{Name: "drill", Class: "warn", Title: "The last drill failed " + agoText(d.Time, now) + ".",
		Text: "What canaryd took away for it was not noticed, or not put back in time; a flush may fare the same. The log says why. Once that is mended:", Command: "canaryd drill"}}
}
