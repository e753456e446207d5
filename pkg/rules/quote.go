package rules

import "strings"

// Split cuts a line of iptables-save into its words.
//
// The quoting is iptables' own (xtables' add_param_to_argv), not a shell's:
// only the double quote quotes, a backslash escapes inside quotes, and every
// other character stands for itself.
func Split(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	started, quoted, escaped := false, false, false
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case escaped:
			word.WriteByte(c)
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case quoted && c == '"':
			quoted = false
		case quoted:
			word.WriteByte(c)
		case c == '"':
			quoted, started = true, true
		case c == ' ' || c == '\t':
			if started {
				words = append(words, word.String())
				word.Reset()
				started = false
			}
		default:
			word.WriteByte(c)
			started = true
		}
	}
	if quoted {
		return nil, &ParseError{Text: line, Reason: "has a quote that is not closed"}
	}
	if started {
		words = append(words, word.String())
	}
	return words, nil
}

// Quote writes one word so that Split and iptables read it back unchanged.
func Quote(word string) string {
	if word != "" && !strings.ContainsAny(word, " \t\"'\\") {
		return word
	}
	var b strings.Builder
	b.WriteByte('"')
	for i := 0; i < len(word); i++ {
		if word[i] == '"' || word[i] == '\\' {
			b.WriteByte('\\')
		}
		b.WriteByte(word[i])
	}
	b.WriteByte('"')
	return b.String()
}
