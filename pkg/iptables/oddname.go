package iptables

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
)

// This file finds names in the bytes of rules that iptables prints without quotes and would read
// back differently. A name with a space in it is two words. extensions.go has the offsets of the
// names.

// oddExtension returns the reason why a rule with this extension has no text that may be
// written back, or "". The rule is then opaque (ruleShape.odd). data are those behind the
// extension's head.
func oddExtension(name string, revision byte, data []byte) string {
	texts, known := extensions[name]
	if !known {
		return oddRun(name, data)
	}
	for _, t := range texts {
		if !t.printed(revision, data) {
			continue
		}
		text := nft.UntilNUL(t.of(data))
		if t.quoted {
			if bytes.ContainsFunc(text, isControl) {
				return fmt.Sprintf("the text of its %s holds a line break or another control character", name)
			}
		} else if reason := oddName(string(text)); reason != "" {
			return fmt.Sprintf("a name in its %s %s", name, reason)
		}
	}
	switch {
	case name == "string":
		return oddPattern(data)
	case name == "CONNMARK" && revision == 2:
		return oddShift(data)
	}
	return ""
}

// oddShift checks the target CONNMARK (struct xt_connmark_tginfo2) for oddExtension. iptables
// prints nothing for a shift by 0 to the right, as for no shift.
func oddShift(data []byte) string {
	const rightAt, bitsAt = 12, 13
	if len(data) > bitsAt && data[rightAt] != 0 && data[bitsAt] == 0 {
		return "it shifts a mark by 0 to the right, which iptables does not print"
	}
	return ""
}

// oddName returns the reason why a name without quotes reads back as another one, or "". The
// reason is the end of a sentence that begins with the kind of name.
func oddName(name string) string {
	switch {
	case strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c == 0x7f }):
		return fmt.Sprintf("(%q) holds a space or a control character, which iptables prints without quotes", name)
	case strings.Contains(name, `"`):
		return fmt.Sprintf("(%q) holds a quote, which iptables prints as it is", name)
	case strings.HasPrefix(name, "!"):
		return fmt.Sprintf("(%q) begins with !, which iptables reads as a negation", name)
	}
	return ""
}

func isControl(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }

// oddPattern checks the match "string" (struct xt_string_info) for oddExtension. iptables
// prints a pattern in quotes and escapes the quotes in it, but no backslash (print_string in
// libxt_string.c of 1.8.9).
func oddPattern(data []byte) string {
	const patternAt, lengthAt = 20, 148
	if len(data) <= lengthAt {
		return ""
	}
	if reason := oddName(string(nft.UntilNUL(data[4:patternAt]))); reason != "" {
		return "the algorithm of its string " + reason
	}
	pattern := data[patternAt : patternAt+min(int(data[lengthAt]), lengthAt-patternAt)]
	asHex := bytes.ContainsFunc(pattern, func(c rune) bool { return c < ' ' || c > '~' }) || bytes.HasSuffix(pattern, []byte(`\`))
	if !asHex && bytes.Contains(pattern, []byte(`\`)) {
		return "the pattern of its string holds a backslash, which iptables prints without an escape"
	}
	return ""
}

// oddRun looks for text with a space or a quote in the data of an extension that oddExtension
// does not know. Three characters count as a text although addresses have four bytes: in doubt,
// the rule is odd.
func oddRun(name string, data []byte) string {
	const least = 3
	for len(data) > 0 {
		n := 0
		for n < len(data) && (data[n] >= ' ' && data[n] <= '~' || data[n] == '\t' || data[n] == '\n' || data[n] == '\r') {
			n++
		}
		if run := data[:n]; n >= least && bytes.ContainsAny(bytes.TrimSpace(run), " \t\r\n\"") {
			return fmt.Sprintf("its extension %s holds the text %q, which iptables may print without quotes", name, run)
		}
		data = data[min(n+1, len(data)):]
	}
	return ""
}
