package rules

import "strings"

// Split cuts a line of iptables-save into its words.
//
// The quoting is iptables' own (xtables' add_param_to_argv), not a shell's. Only the double
// quote quotes, a backslash escapes inside quotes, and every other character has no special
// meaning.
func Split(line string) ([]string, error) {
	var words []string
	for i := 0; i < len(line); {
		if line[i] == ' ' || line[i] == '\t' {
			i++
			continue
		}
		word, n := splitWord(line[i:])
		if n == 0 {
			return nil, &ParseError{Text: line, Reason: "has a quote that is not closed"}
		}
		if words == nil {
			words = make([]string, 0, 1+strings.Count(line, " "))
		}
		words = append(words, word)
		i += n
	}
	return words, nil
}

// splitWord returns the first word of text for Split, and the number of its bytes in text; 0
// if a quote is not closed.
func splitWord(text string) (word string, length int) {
	end := strings.IndexAny(text, " \t\"")
	switch {
	case end < 0:
		return text, len(text)
	case text[end] != '"':
		return text[:end], end
	}
	if end == 0 {
		// Most quoted words have no escape and end with the quote.
		if n := strings.IndexAny(text[1:], `"\\`) + 1; n > 0 && text[n] == '"' && (n+1 == len(text) || text[n+1] == ' ') {
			return text[1:n], n + 1
		}
	}
	var b strings.Builder
	quoted, escaped := false, false
	for i := range len(text) {
		c := text[i]
		switch {
		case escaped:
			b.WriteByte(c)
			escaped = false
		case quoted && c == '\\':
			escaped = true
		case c == '"':
			quoted = !quoted
		case !quoted && (c == ' ' || c == '\t'):
			return b.String(), i
		default:
			b.WriteByte(c)
		}
	}
	if quoted {
		return "", 0
	}
	return b.String(), len(text)
}

// Quote writes one word so that Split and iptables read it back unchanged. It quotes only
// where that is needed.
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
