package main

import (
	"regexp"
	"strings"
	"unicode/utf8"
)

// item matches the beginning of a list's item: its bullet or number.
var item = regexp.MustCompile(`^( {0,3})([-*+]|\d+\.) +`)

// breakable reports whether a line of Markdown is prose with a space at which to break it. A
// table, heading, HTML or picture is no prose.
func breakable(line string) bool {
	text := strings.TrimSpace(line)
	if text == "" || strings.ContainsAny(text[:1], "|<#") || strings.HasPrefix(text, "![") || strings.HasPrefix(line, "    ") && !item.MatchString(line) {
		return false
	}
	return strings.Contains(strings.TrimSpace(item.ReplaceAllString(line, "")), " ")
}

// wrap returns Markdown with its paragraphs and list items wrapped to the largest allowed
// width. Code, tables, headings and HTML stay unchanged.
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
		case m != "":
			flush()
			paragraph, indent = []string{line}, strings.Repeat(" ", utf8.RuneCountInString(m))
		case !breakable(line) && len(paragraph) > 0 && strings.TrimSpace(line) != "" && !strings.ContainsAny(strings.TrimSpace(line)[:1], "|<#!"):
			paragraph = append(paragraph, line) // a last line of one word, or an indented one
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

// word is a run without a space outside of code: `iptables -F` stays on one line.
var word = regexp.MustCompile("(?:`[^`]*`|[^\\s`])+|`")

// fill breaks the words of a paragraph into lines, and indents all but the first. Two spaces at
// the end of a line are a line break, which stays.
func fill(paragraph []string, indent string) []string {
	var lines []string
	for start, i := 0, 0; i < len(paragraph); i++ {
		broken := strings.HasSuffix(paragraph[i], "  ")
		if !broken && i+1 < len(paragraph) {
			continue
		}
		first := indent
		if start == 0 {
			first = paragraph[0][:len(paragraph[0])-len(strings.TrimLeft(paragraph[0], " "))]
		}
		lines = append(lines, fillOne(strings.Join(paragraph[start:i+1], "\n"), first, indent)...)
		if broken {
			lines[len(lines)-1] += "  "
		}
		start = i + 1
	}
	return lines
}

// fillOne breaks text without a line break.
func fillOne(text, first, indent string) []string {
	var lines []string
	line, empty := first, true
	for _, w := range word.FindAllString(text, -1) {
		w = strings.ReplaceAll(w, "\n", " ")
		if !empty && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(w) > widest {
			lines = append(lines, line)
			line, empty = indent, true
		}
		if !empty {
			line += " "
		}
		line, empty = line+w, false
	}
	return append(lines, line)
}
