package rules

import (
	"fmt"
	"strings"
)

// A ParseError names the wrong text, and says why it is wrong.
type ParseError struct {
	Line   int    // 1 for the first line; 0 where there are no lines
	Text   string // empty where it must not be shown
	Reason string
}

// Error names the line, if there is one, the first 120 bytes of its text, if it may be
// shown, and the reason.
func (e *ParseError) Error() string {
	text := e.Text
	if len(text) > 120 {
		text = text[:120] + "..."
	}
	what := e.Reason
	if text != "" {
		what = fmt.Sprintf("%q %s", text, e.Reason)
	}
	if e.Line == 0 {
		return what
	}
	return fmt.Sprintf("line %d: %s", e.Line, what)
}

// ParseRule reads a rule's text: the part behind "-A CHAIN ". Fragments, stored generations
// and scripts are read so. A rule whose text may not be written back is opaque. The error is
// a *ParseError: the text cannot be split, or its bytes do not fit its digest.
func ParseRule(spec string) (Rule, error) {
	if strings.HasPrefix(spec, opaqueStart) {
		rule := parseOpaque(spec)
		if rule.HasBytes() {
			if _, _, _, ok := rule.Bytes(); !ok {
				return Rule{}, &ParseError{Text: rule.Label(), Reason: "names bytes that are not those of its digest"}
			}
		}
		return rule, nil
	}
	words, err := Split(spec)
	if err != nil {
		return Rule{}, err
	}
	goes, understood := target(words)
	if reason := whyNotWritable(spec, words, understood); reason != "" {
		return OpaqueRule([]byte(spec), goes, reason), nil
	}
	return Rule{Spec: spec, Target: goes}, nil
}

// target returns the target of a rule for ParseRule; "" if it has none. understood says that
// each word is a known option of a rule or its value. Otherwise ParseRule checks whether the
// text may be written.
func target(words []string) (name string, understood bool) {
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if f.read(words) {
		if f.target >= 0 {
			name = f.exts[f.target].name
		}
		return name, f.understood()
	}
	for i := 0; i+1 < len(words); i++ {
		switch words[i] {
		case "--comment", "--log-prefix", "--nflog-prefix", "--string":
			i++ // the next word is free text, not an option
		case "-j", "-g", "--jump", "--goto":
			name = words[i+1]
		}
	}
	return name, false
}
