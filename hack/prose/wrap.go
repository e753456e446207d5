package main

import (
	"regexp"
	"strings"
	"unicode/utf8"
)

// item is the beginning of a list's item: its bullet or number.
var item = regexp.MustCompile(`^(\s*)([-*+]|\d+\.) +`)

// breakable reports whether a line of Markdown is prose: it is no table, heading, HTML or picture,
// and has a space to break it at.
func breakable(line string) bool {
	text := strings.TrimSpace(line)
	if text == "" || strings.ContainsAny(text[:1], "|<#") || strings.HasPrefix(text, "![") || strings.HasPrefix(line, "    ") && !item.MatchString(line) {
		return false
	}
	return strings.Contains(strings.TrimSpace(item.ReplaceAllString(line, "")), " ")
}

// wrap returns Markdown with its paragraphs and list items wrapped to the widest that a line may
// be. Code, tables, headings and HTML stay as they are.
func wrap(text string) string {
	var out, paragraph []string
	indent := "" // of the lines behind the paragraph's first one
	flush := func() {
		out = append(out, fill(paragraph, indent)...)
		paragraph, indent = nil, ""
	}
	fenced := false
	for _, line := range strings.Split(text, "\n") {
		fence := strings.HasPrefix(strings.TrimSpace(line), "```")
		switch m := item.FindString(line); {
		case fence || fenced:
			flush()
			out = append(out, line)
			fenced = fenced != fence
		case m != "" && breakable(line):
			flush()
			paragraph, indent = []string{line}, strings.Repeat(" ", utf8.RuneCountInString(m))
		case !breakable(line) && len(paragraph) > 0 && strings.TrimSpace(line) != "" && !strings.ContainsAny(strings.TrimSpace(line)[:1], "|<#!"):
			paragraph = append(paragraph, line) // a last line of one word, or one that is indented as its item is
		case !breakable(line):
			flush()
			out = append(out, line)
		case len(paragraph) == 0:
			paragraph, indent = []string{line}, line[:len(line)-len(strings.TrimLeft(line, " "))]
		default:
			paragraph = append(paragraph, line)
		}
	}
	flush()
	return strings.Join(out, "\n")
}

// fill breaks the words of a paragraph into lines, all but the first behind an indent. Two spaces
// at the end of a line are a line break, which stays.
func fill(paragraph []string, indent string) []string {
	var lines []string
	line := ""
	for i, text := range paragraph {
		for _, word := range strings.Fields(text) {
			switch {
			case line == "" && len(lines) == 0 && i == 0:
				line = text[:len(text)-len(strings.TrimLeft(text, " "))] + word
			case line == "":
				line = indent + word
			case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > widest:
				lines = append(lines, line)
				line = indent + word
			default:
				line += " " + word
			}
		}
		if strings.HasSuffix(text, "  ") && line != "" {
			lines = append(lines, line+"  ")
			line = ""
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}
